"""What is removed stays removed, whatever goes wrong and whoever copies it just then."""

import pytest

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_serving.store.cluster.removal import MAX_ROUNDS
from mooncake_serving.store.copies.copies import Copies

from ..spread.support import hosts_with
from .support import SomeDirectory, replaced, value

STORED = PutResult.STORED


class Forgetful(SomeDirectory):
    """A directory that does what it is told, once, and is away before it says so."""

    def __init__(self, directory, name: str):
        super().__init__(directory)
        self.forgets = name

    def __getattr__(self, name: str):
        call = super().__getattr__(name)
        if name != self.forgets:
            return call

        def fail(*args):
            self.forgets = ""
            call(*args)
            raise Unavailable(f"{name}: the connection is lost")

        return fail


def look_at_everything(hosts) -> None:
    for host in hosts.all:
        if host.store is not None:
            host.node.listing.publish_all()


@pytest.mark.parametrize("call", ["holders", "withdraw_all"])
def test_an_answer_of_the_directory_is_lost(hosts, call):
    one = hosts.make("one")
    two = hosts.make("two", directory=Forgetful(hosts.directory, call))
    one.cluster.put("a", value(1))
    with pytest.raises(Unavailable, match="the connection is lost"):
        two.cluster.remove("a")
    # Nothing of it was done, or all of it.
    look_at_everything(hosts)
    assert one.store.exists("a") is two.cluster.exists("a") is (call == "holders")
    assert two.cluster.remove("a") is (call == "holders")
    look_at_everything(hosts)
    assert hosts_with(hosts.all, "a") == [] and not two.cluster.exists("a")


def test_the_remover_dies_after_the_holder_has_dropped_it(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    with replaced(two.node.listing, "withdraw_all", lambda *_: 1 / 0):
        with pytest.raises(ZeroDivisionError):
            two.cluster.remove("a")
    one.node.listing.tell_changes()  # as it does by itself
    assert not two.cluster.exists("a") and two.cluster.put("a", value(2)) is STORED


def test_the_remover_dies_before_the_holder_has_dropped_it(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    with replaced(two.node.asking, "remove", lambda *_: 1 / 0):
        with pytest.raises(ZeroDivisionError):
            two.cluster.remove("a")
    assert two.cluster.get("a") == value(1)
    assert two.cluster.remove("a")


def removing(remover, key, looker=None):
    """Reads objects, of which one is removed when it has been read, and everybody looks."""

    def read(read, *args, **options):
        outcomes = read(*args, **options)
        if remover.cluster.exists(key):
            assert remover.cluster.remove(key)
        if looker is not None:
            looker.node.listing.tell_changes()
            looker.node.listing.publish_all()
        return outcomes

    return read


@pytest.mark.parametrize("looks", [False, True])
def test_it_is_fetched_meanwhile(hosts, looks):
    one, two, three = hosts.several(3)
    one.cluster.put_each(["a", "b"], [value(1), value(2)])
    looker = two if looks else None
    with replaced(two.node._reader, "read", removing(three, "a", looker)):
        assert two.cluster.fetch(["a", "b"]) == [None, STORED]
    assert hosts_with(hosts.all, "a") == [] and not three.cluster.exists("a")
    assert hosts_with(hosts.all, "b") == ["host-0", "host-1"]
    look_at_everything(hosts)
    assert not three.cluster.exists("a") and two.store.get("b") == value(2)
    assert two.cluster.view("a") is None
    assert three.cluster.put("a", value(3)) is STORED and one.cluster.get("a") == value(3)


@pytest.mark.parametrize("looks", [False, True])
def test_it_is_copied_meanwhile(hosts, looks):
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    looker = two if looks else None
    with replaced(two.node._reader, "read", removing(three, "a", looker)):
        copied = Copies(one.cluster).copy(["a"], two.node.name)
    assert copied.failed == {0: f"{two.node.name}: it was removed meanwhile"}
    assert hosts_with(hosts.all, "a") == [] and not three.cluster.exists("a")


def test_a_copy_is_published_before_the_holder_drops_it(hosts):
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))

    def fetch_first(remove, member, keys):
        two.cluster.fetch(["a"])
        return remove(member, keys)

    with replaced(three.node.asking, "remove", fetch_first):
        assert three.cluster.remove("a")
    assert hosts_with(hosts.all, "a") == [] and not three.cluster.exists("a")


def test_of_two_holders_one_copies_it_from_the_other(hosts):
    """Who has dropped it has it again when the other one drops it."""
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])
    asked = []

    def copy_again(remove, member, keys):
        if asked and member not in asked:
            [first] = [host for host in (one, two) if host.node.name == asked[0]]
            assert first.cluster.fetch(["a"]) == [STORED]
        asked.append(member)
        return remove(member, keys)

    with replaced(three.node.asking, "remove", copy_again):
        assert three.cluster.remove("a")
    assert hosts_with(hosts.all, "a") == [] and not three.cluster.exists("a")


def test_who_is_not_reached_keeps_it_and_it_is_found_there(hosts):
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])

    def away(remove, member, keys):
        if member == one.node.name:
            raise TransferError(member, "connection refused")
        return remove(member, keys)

    with replaced(three.node.asking, "remove", away):
        with pytest.raises(Unavailable, match="not removed everywhere: .*refused"):
            three.cluster.remove("a")
    assert hosts_with(hosts.all, "a") == ["host-0"] and three.cluster.get("a") == value(1)


def test_who_puts_it_again_and_again_does_not_keep_the_remover_for_ever(hosts):
    one, two, three = hosts.several(3)
    rounds = []

    def put_again(withdraw, keys):
        told = withdraw(keys)
        rounds.append(told)
        put_in_both()
        return told

    def put_in_both():
        one.cluster.put("a", value(1))
        two.cluster.fetch(["a"])

    put_in_both()

    with replaced(three.node.listing, "withdraw_all", put_again):
        assert three.cluster.remove("a")
    assert len(rounds) == MAX_ROUNDS and one.cluster.get("a") == value(1)


def test_when_the_directory_is_away_a_copy_is_kept_and_told_later(hosts):
    away = SomeDirectory(hosts.directory)
    one, two = hosts.make("one"), hosts.make("two", directory=away)
    two.node._membership.refresh()
    one.cluster.put("a", value(1))

    def read(read, *args, **options):
        outcomes = read(*args, **options)
        away.is_away = True
        return outcomes

    with replaced(two.node._reader, "read", read):
        assert two.cluster.fetch(["a"]) == [STORED]
    away.is_away = False
    assert two.node.listing.is_stale
    two.node.listing.publish_all()
    assert one.store.remove("a") and two.store.get("a") == value(1)
    assert two.node.pool_name in hosts.directory.holders(one.cluster.keyspace.keys(["a"]))[0]
