"""Where a model's rows can be taken up again, by its caches; what is saved at boundaries is shared, never changed."""

import mlx.core as mx
import pytest

from lanes.boundary import Remembers, Saved, remembers
from lanes.rows import held_alone
from tests.lanes.rows.test_laws import solo


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("kv",) * 3, "anywhere"),
        (("kv", "qkv+qkv"), "anywhere"),
        (("kv", "rotating"), "boundaries"),
        (("rotating-qkv", "qkv"), "boundaries"),
        (("ssm+kv", "ssm+kv"), "boundaries"),
        (("kv", "LayerCache"), "nothing"),
        (("ssm", "kv+ChunkedKVCache"), "nothing"),
    ],
)
def test_remembers(kinds: tuple[str, ...], expected: Remembers) -> None:
    assert remembers(kinds) == expected


def test_a_copy_goes_its_own_way() -> None:
    saved = Saved()
    kinds = ("rotating", "ssm")
    mx.eval(saved.add(held_alone([solo(kind, 1, 5, 3) for kind in kinds], 5), 5))
    other, before = saved.copy(), saved.nbytes
    mx.eval(other.add(held_alone([solo(kind, 1, 7, 3) for kind in kinds], 7), 7))
    assert (saved.boundaries, other.boundaries) == ([5], [5, 7])
    assert saved.nbytes == before < other.nbytes
    assert set(saved.state) == {5}


def test_what_was_saved_before_is_not_saved_again() -> None:
    saved = Saved()
    for at in (5, 5, 7):
        mx.eval(saved.add(held_alone([solo("rotating", 1, at, 3)], at), at))
    held = saved.rings["0.0", "0.1"]
    assert [array.shape[2] for each in held for array in each.arrays] == [5, 5, 2, 2]
