"""Who may have written a cache: owner, mode, access list, from the top of the path to the file."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from entries import key, publish
from owned import ENTRY, EVERYONE, ME, OTHER, PLACE, found, group_of, needs_root, part

from jitkern.cache import search, strangers
from jitkern.cache.store import Cache
from jitkern.cache.trust import UntrustedError
from jitkern.env import Trust
from jitkern.errors import CacheError

# -- modes -----------------------------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> set[tuple[str, str]]:
    everything = [folder, *folder.rglob("*")]
    kept = [path for path in everything if path.name != ".bytes"]
    return {
        ("folder" if path.is_dir() else "file", oct(stat.S_IMODE(path.stat().st_mode)))
        for path in kept
    }


def test_what_is_made_is_closed_under_any_umask(umask: None, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "above" / "cache")
    publish(cache)
    assert modes(tmp_path / "above") == {("folder", "0o700"), ("file", "0o600")}
    with cache.lock(key(), timeout_s=1) as wait:
        assert wait.held
        locks = cache.root / "v1" / ".locks"
        assert stat.S_IMODE(locks.stat().st_mode) == 0o700
        assert stat.S_IMODE((locks / f"{key().directory}.lock").stat().st_mode) == 0o600


def test_what_is_made_for_others_is_open_to_them_under_any_umask(
    umask: None, tmp_path: Path
) -> None:
    publish(Cache(tmp_path / "above" / "out", shared=True))
    assert modes(tmp_path / "above") == {("folder", "0o755"), ("file", "0o644")}


def test_a_groups_own_cache_stays_the_groups(
    umask: None, tmp_path: Path, no_private_groups: None
) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    if os.geteuid() == 0:
        os.chown(root, -1, OTHER)  # not the group that files get elsewhere
    root.chmod(0o2770)
    whom = Trust(groups=frozenset({root.stat().st_gid}))
    publish(Cache(root, trust=whom))
    folders = {
        oct(stat.S_IMODE(part(root, name).stat().st_mode)) for name in ("base", "key", "entry")
    }
    assert folders == {"0o2770"}
    assert stat.S_IMODE(part(root, "meta").stat().st_mode) == 0o640
    with Cache(root, trust=whom).lock(key(), timeout_s=1) as wait:
        assert wait.held
        (lock,) = (root / "v1" / ".locks").glob("*.lock")
        assert stat.S_IMODE(lock.stat().st_mode) == 0o660  # the other members have to lock it too
    assert found(root, whom)
    assert {path.stat().st_gid for path in root.rglob("*")} == {root.stat().st_gid}
    with pytest.raises(UntrustedError):
        found(root)


# -- who may write ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLACE)
@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702])
def test_a_place_that_others_may_write(cache_root: Path, name: str, mode: int) -> None:
    path = part(cache_root, name)
    path.chmod(mode)
    group = f"group:{group_of(path)}"
    who = "everyone" if mode & 0o002 else group
    advice = f"chmod -R go-w {path} if all in it is yours"
    if who == group:
        advice += f", or set JITKERN_CACHE_TRUST={group} if you trust them"
    with pytest.raises(UntrustedError) as caught:
        found(cache_root)
    assert str(caught.value) == (
        f"{path} (owner {ME}, mode {mode:04o}): {who} can change what is in it; {advice}"
    )
    assert found(cache_root, EVERYONE)
    path.chmod(0o755)
    assert found(cache_root)


@pytest.mark.parametrize("name", ENTRY)
def test_an_entry_that_others_may_write_is_none(cache_root: Path, name: str) -> None:
    path = part(cache_root, name)
    path.chmod(0o777)
    cache = Cache(cache_root)
    with pytest.warns(RuntimeWarning, match="this cache entry is not used: ") as warned:
        assert cache.lookup(key()) is None
        assert cache.lookup(key()) is None
    (warning,) = warned
    assert f"{path} (owner {ME}, mode 0777): everyone can change" in str(warning.message)
    assert found(cache_root, EVERYONE)


@pytest.mark.parametrize("name", ["entry", "artefact", "meta"])
def test_an_entry_that_others_may_write_is_replaced(cache_root: Path, name: str) -> None:
    part(cache_root, name).chmod(0o777)
    publish(Cache(cache_root))
    assert found(cache_root)


def test_nothing_is_published_where_others_may_write(cache_root: Path) -> None:
    part(cache_root, "key").chmod(0o777)
    with pytest.raises(UntrustedError, match="everyone can change what is in it"):
        publish(Cache(cache_root))
    cache_root.chmod(0o777)
    before = sorted(cache_root.rglob("*"))
    cache = Cache(cache_root)
    with pytest.raises(CacheError, match="everyone can change what is in it"):
        publish(cache, "another")
    with cache.lock(key(), timeout_s=1) as wait:
        assert not wait.held
    assert cache.failure(key()).path.parts[:2] == ("/", "dev")
    assert sorted(cache_root.rglob("*")) == before


def test_a_trusted_group_may_write(cache_root: Path) -> None:
    group = cache_root.stat().st_gid
    cache_root.chmod(0o2770)
    assert found(cache_root, Trust(groups=frozenset({group})))
    with pytest.raises(UntrustedError, match="group:"):
        found(cache_root, Trust(groups=frozenset({group + 1})))
    cache_root.chmod(0o2777)
    with pytest.raises(UntrustedError, match="everyone"):
        found(cache_root, Trust(groups=frozenset({group})))


def test_the_private_group_of_its_owner_may_write(
    cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    group = cache_root.stat().st_gid
    me = SimpleNamespace(pw_name="alice", pw_uid=os.geteuid(), pw_gid=group)
    bob = SimpleNamespace(pw_name="bob", pw_uid=OTHER, pw_gid=group + 1)
    users, members, name = [me, bob], ["alice"], "alice"
    monkeypatch.setattr(pwd, "getpwuid", lambda user: me)
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(
        grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=list(members))
    )

    def accepted() -> bool:
        strangers._private_group.cache_clear()
        try:
            return found(cache_root)
        except UntrustedError:
            return False

    cache_root.chmod(0o770)
    assert accepted()
    members.append("bob")
    assert not accepted()
    members.remove("bob")
    bob.pw_gid = group
    assert not accepted()
    bob.pw_gid += 1
    name = "users"
    assert not accepted()
    name = "alice"
    assert accepted()
    strangers._private_group.cache_clear()


# -- owners ----------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("name", [*PLACE, *ENTRY])
def test_what_belongs_to_somebody_else(cache_root: Path, name: str) -> None:
    path = part(cache_root, name)
    os.chown(path, OTHER, OTHER)
    mode = stat.S_IMODE(path.stat().st_mode)
    message = (
        f"{path} (owner {OTHER}, mode {mode:04o}): {OTHER} can change what is in it; "
        f"chown -R {ME} {path} if all in it is yours, "
        f"or set JITKERN_CACHE_TRUST={OTHER} if you trust them"
    )
    if name in PLACE:
        with pytest.raises(UntrustedError) as caught:
            found(cache_root)
        assert str(caught.value) == message
    else:
        with pytest.warns(RuntimeWarning) as warned:
            assert not found(cache_root)
        assert [str(one.message) for one in warned] == [
            f"jitkern: this cache entry is not used: {message}"
        ]
    assert found(cache_root, Trust(users=frozenset({OTHER})))
    assert found(cache_root, EVERYONE)
    os.chown(path, 0, OTHER)
    assert found(cache_root)


@needs_root
def test_somebody_elses_that_others_may_write_too(cache_root: Path) -> None:
    os.chown(cache_root, OTHER, OTHER)
    cache_root.chmod(0o775)
    with pytest.raises(UntrustedError) as caught:
        found(cache_root)
    assert str(caught.value) == (
        f"{cache_root} (owner {OTHER}, mode 0775): {OTHER} and group:{OTHER} can change what is "
        f"in it; chown -R {ME} {cache_root} && chmod -R go-w {cache_root} if all in it is yours, "
        f"or set JITKERN_CACHE_TRUST={OTHER},group:{OTHER} if you trust them"
    )


@needs_root
def test_a_member_of_a_trusted_group_may_own(cache_root: Path) -> None:
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        pytest.skip("needs a user nobody")
    os.chown(cache_root, nobody.pw_uid, nobody.pw_gid)
    assert found(cache_root, Trust(groups=frozenset({nobody.pw_gid})))
    with pytest.raises(UntrustedError):
        found(cache_root, Trust(groups=frozenset({nobody.pw_gid + 1})))


# -- access lists ----------------------------------------------------------------------------------

_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER, _NOBODY = 1, 2, 4, 8, 16, 32, 0xFFFFFFFF


def set_acl(path: Path, named: tuple[int, int, int], mask: int = 7) -> None:
    """Give `path` mode 0700 and one named user or group; setfacl itself is seldom installed."""
    entries = [(_USER_OBJ, 7, _NOBODY), (_GROUP_OBJ, 0, _NOBODY), named]
    entries += [(_MASK, mask, _NOBODY), (_OTHER, 0, _NOBODY)]
    packed = b"".join(struct.pack("<HHI", *entry) for entry in sorted(entries))
    try:
        os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + packed)
    except OSError as error:
        pytest.skip(f"needs a file system with access lists: {error.strerror}")


@pytest.mark.parametrize(
    ("tag", "who", "whom"),
    [
        (_USER, str(OTHER), Trust(users=frozenset({OTHER}))),
        (_GROUP, f"group:{OTHER}", Trust(groups=frozenset({OTHER}))),
    ],
)
@pytest.mark.parametrize("name", PLACE)
def test_an_access_list_that_lets_others_write(
    cache_root: Path, name: str, tag: int, who: str, whom: Trust
) -> None:
    path = part(cache_root, name)
    set_acl(path, (tag, 7, OTHER))
    with pytest.raises(UntrustedError) as caught:
        found(cache_root)
    assert str(caught.value) == (
        f"{path} (owner {ME}, mode 0770): {who} can change what is in it; chmod -R go-w {path} "
        f"if all in it is yours, or set JITKERN_CACHE_TRUST={who} if you trust them"
    )
    assert found(cache_root, whom)
    subprocess.run(["chmod", "-R", "go-w", str(path)], check=True)  # as the message says
    assert found(cache_root)


def test_an_access_list_that_lets_others_read(cache_root: Path) -> None:
    set_acl(cache_root, (_USER, 5, OTHER), mask=5)
    assert found(cache_root)
    set_acl(cache_root, (_USER, 7, OTHER), mask=5)
    assert found(cache_root)


# -- the directories above -------------------------------------------------------------------------


def test_the_directories_above(cache_root: Path) -> None:
    above = cache_root.parent
    above.chmod(0o1777)
    assert found(cache_root)  # like /tmp: nobody can rename what is ours
    above.chmod(0o777)
    with pytest.raises(UntrustedError) as caught:
        found(cache_root)
    assert str(caught.value) == (
        f"{above} (owner {ME}, mode 0777): everyone can change what is in it; chmod go-w {above}"
    )
    with pytest.raises(UntrustedError):
        publish(Cache(above / "new"))
    assert not (above / "new").exists()
    assert found(cache_root, home=cache_root)
    assert found(cache_root, EVERYONE)
    with pytest.raises(UntrustedError):
        found(cache_root, home=above)
    with pytest.raises(UntrustedError):
        found(cache_root, home=above / "elsewhere")


def test_above_the_home_directory_nothing_is_asked(tmp_path: Path, no_private_groups: None) -> None:
    home = tmp_path / "open" / "home"
    home.mkdir(parents=True)
    home.chmod(0o755)
    home.parent.chmod(0o755)
    root = home / ".cache" / "jitkern"
    publish(Cache(root))
    (tmp_path / "open").chmod(0o777)
    assert found(root, home=home)
    with pytest.raises(UntrustedError):
        found(root)
    (home / ".cache").chmod(0o770)
    with pytest.raises(UntrustedError, match=r"/\.cache \(owner"):
        found(root, home=home)


@needs_root
def test_somebody_elses_directory_above(cache_root: Path) -> None:
    os.chown(cache_root.parent, OTHER, OTHER)
    cache_root.parent.chmod(0o1755)
    with pytest.raises(UntrustedError) as caught:
        found(cache_root)
    assert str(caught.value) == (
        f"{cache_root.parent} (owner {OTHER}, mode 1755): {OTHER} can change what is in it; "
        f"put the cache elsewhere, or set JITKERN_CACHE_TRUST={OTHER} if you trust them"
    )


# -- the cache of the package ----------------------------------------------------------------------


def test_a_package_that_is_closed_to_us_has_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is for a server that has become another user since its imports."""
    monkeypatch.setattr(search, "SHIPPED", tmp_path / "closed" / "_prebuilt")
    shipped = search._shipped()
    assert shipped.lookup(key()) is None
    assert Cache.of(shipped, None).entries() == []
