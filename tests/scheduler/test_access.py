"""Who is let in, by the kernel's word on the peer."""

import grp
import os
import pwd

import pytest

from scheduler.access import Access, UnknownName
from scheduler.peer import Peer


def test_our_own_user_and_root_always_may() -> None:
    for access in (Access(), Access(uids=frozenset({5})), Access(gids=frozenset({5}))):
        assert access.admits(Peer(os.geteuid()))
        assert access.admits(Peer(0))
        assert not access.admits(Peer(4_000_000, frozenset({4_000_000})))


def test_names_and_numbers_stand_for_the_same() -> None:
    user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(os.getegid())
    named = Access.named([user.pw_name], [group.gr_name])
    assert named == Access.named([str(user.pw_uid)], [str(group.gr_gid)])
    assert named == Access(frozenset({user.pw_uid}), frozenset({group.gr_gid}))


@pytest.mark.parametrize(("users", "groups"), [(["nobody-of-this-name"], []), ([], ["nobody-of-this-name"])])
def test_a_name_that_nobody_has_is_told(users: list[str], groups: list[str]) -> None:
    with pytest.raises(UnknownName, match="'nobody-of-this-name' on this machine"):
        Access.named(users, groups)


def test_a_group_counts_wherever_the_peer_has_it() -> None:
    access = Access(gids=frozenset({7}))
    assert access.admits(Peer(12345, frozenset({7})))
    assert access.admits(Peer(12345, frozenset({1, 2, 7})))
    assert not access.admits(Peer(7, frozenset({1, 2})))


def test_the_file_is_opened_no_wider_than_that() -> None:
    assert (Access().mode, Access().group) == (0o600, None)
    one_group = Access(gids=frozenset({7}))
    assert (one_group.mode, one_group.group) == (0o660, 7)
    for wider in (Access(uids=frozenset({5})), Access(frozenset({5}), frozenset({7})), Access(gids=frozenset({7, 8}))):
        assert (wider.mode, wider.group) == (0o666, None)
