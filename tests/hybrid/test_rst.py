"""Sections of prose out of reStructuredText."""

from tests.hybrid.rst import Section, plain, prose, sections

DOCUMENT = """\
.. _somewhere:

Files and folders
=================

The :mod:`os` module and ``pathlib`` know *where* things are; see :meth:`Path.exists
<pathlib.Path.exists>` and `the manual <where>`_ for |more| of it.

Here is how it is done in two lines. For example::

    this is no prose at all, though it has some words.

* An item of a list, which
  goes on in a second line.

.. function:: os.path.exists(path, *, follow=True)

   Return whether there is such a path, whatever it may be.

   .. versionadded:: 3.2
      It was not there in earlier versions of the library.

   .. note::

      A broken link does not exist for this function.

This belongs to the heading again, and not to the function.

+-----+----------------------------------------+
| A   | Tables of words are left out of it all. |
+-----+----------------------------------------+
"""


def test_a_document() -> None:
    assert list(sections(DOCUMENT, "")) == [
        Section(
            "path.exists",
            [
                "Return whether there is such a path, whatever it may be.",
                "A broken link does not exist for this function.",
            ],
        ),
        Section(
            "Files and folders",
            [
                "The os module and pathlib know where things are; see Path.exists and the manual for more of it.",
                "Here is how it is done in two lines.",
                "- An item of a list, which goes on in a second line.",
                "This belongs to the heading again, and not to the function.",
            ],
        ),
    ]


def test_a_docstring_without_its_lists() -> None:
    lists = "Parameters\n----------\na : array\n    The numbers that are added up.\n\n"
    text = f"Add up what there is in an array.\n\n{lists}Notes\n-----\nThe order of addition is not told."
    assert list(sections(text, "numpy.lib.sum")) == [
        Section("lib.sum", ["Add up what there is in an array.", "The order of addition is not told."])
    ]


def test_what_is_no_prose() -> None:
    for text in (
        "",
        "Too short.",
        "x = [1, 2, 3]; y = {4: 5, 6: 7}; z = x + y;",
        "Words without an end of the sentence",
    ):
        assert prose(text) is None
    assert prose("Look at https://example.org for all the rest of it.") is None


def test_markup_is_gone() -> None:
    assert plain("a :class:`~os.PathLike`, a :pep:`484`, **bold**, L{Deferred}, a reference [1]_ and\n   two") == (
        "a PathLike, a PEP 484, bold, Deferred, a reference and two"
    )
