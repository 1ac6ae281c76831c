from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from store.names import (
    digests_path,
    is_fan,
    is_sidecar,
    is_temporary,
    lock_path,
    may_delete,
    new_temporary,
    segment_in,
    segment_path,
)

FOLDER = Path("/store")
ids = st.text("0123456789abcdef", min_size=32, max_size=32)


@given(ids)
def test_what_is_built_is_parsed(id_: str) -> None:
    path = segment_path(FOLDER, id_)
    assert is_fan(path.parent.name)
    assert segment_in(path.parent.name, path.name) == id_
    assert may_delete(FOLDER, path)
    assert not may_delete(FOLDER / "ab", path)
    assert not may_delete(FOLDER.parent, path)


def test_temporaries_and_sidecars_are_told_apart() -> None:
    first, second = new_temporary(FOLDER), new_temporary(FOLDER)
    assert first != second
    for path in (first, digests_path(FOLDER).with_name("digests.json.writing")):
        assert is_temporary(path.name)
        assert may_delete(FOLDER, path)
        assert not may_delete(FOLDER.parent, path)
    for path in (lock_path(FOLDER), digests_path(FOLDER)):
        assert is_sidecar(path.name)
        assert not may_delete(FOLDER, path)


@given(st.text() | st.from_regex(r"[0-9a-fA-F]{30,34}\.(segment|writing|Segment)\n?", fullmatch=True))
def test_no_other_name_may_be_deleted(name: str) -> None:
    assert segment_in("zz", name) is None
    path = FOLDER / "ab" / name.replace("/", "")
    ours = name.startswith("ab") and len(name) == 40 and name.endswith(".segment") and name == name.lower()
    assert may_delete(FOLDER, path) == (ours and "/" not in name and all(c in "0123456789abcdef" for c in name[:32]))
