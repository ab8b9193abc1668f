"""Errors that say which ranks are missing and why, or which of them calls what."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jitkern.comm.board import Card, GoneError, SilentError, ask
from jitkern.errors import CommTimeoutError

_REASON_CHARS = 240  # errors quote each other
_GLOO_PLACE = re.compile(r"^\[\S+:\d+\] ")  # file and line of its source
_GLOO_ADVICE = ". This is typically caused by"


def ask_each(
    ranks: Sequence[int], do: Callable[[int], dict[str, Any]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each rank with what `do` returns for it, as they come: all are asked at once.

    Where nobody answers, it is ``{"silence": why}``.
    """
    results: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()

    def work(rank: int) -> None:
        try:
            results.put((rank, do(rank)))
        except GoneError:
            results.put((rank, {"silence": "has ended"}))
        except SilentError as error:
            text = f"does not answer ({error}): it is stopped, or hangs"
            results.put((rank, {"silence": text}))
        except BaseException as error:
            results.put((rank, {"silence": f"could not be asked: {error!r}"}))

    for rank in ranks:
        try:
            threading.Thread(target=work, args=(rank,), daemon=True).start()
        except RuntimeError:  # no threads are left, or the interpreter ends
            work(rank)
    for _ in ranks:
        yield results.get()


def reason(card: Card, answer: Mapping[str, Any], number: int) -> str:
    """Return why a rank has not come to a call, from what its board says."""
    if "silence" in answer:
        return f"{card} {answer['silence']}"
    if number == 0:
        parts = ["has not come to it"]
    elif answer.get("issued"):
        parts = [f"has come to call {answer['issued']} ({answer['op']}) only"]
    else:
        parts = ["has made no call yet"] if "issued" in answer else []
    if "ended" in answer:
        parts.append(f"has {answer['ended']}")
    return f"{card} {', and '.join(parts)}"


class Found(NamedTuple):
    """What ranks say of a call that is not done.

    Attributes
    ----------
    why
        For each rank that is missing, what there is to say.
    notes
        What there is to say of others.
    is_over
        Whether one of them can come no more: time would not help.
    """

    why: dict[int, str]
    notes: list[str]
    is_over: bool
    first: int  # call that one who is alive has not come to; 0: of some this is not known


def find_missing(
    cards: Sequence[Card],
    others: Sequence[int],
    op: str,
    number: int,
    links: Mapping[int, Sequence[tuple[str, int]]],
    timeout_s: float,
    *,
    is_late: bool = True,
) -> Found:
    """Ask ranks where they are, and return which are missing in a call.

    Where a rank has `links`, names of ``Position.links``, it is to have made so many of each.
    Before a deadline (not `is_late`) who is behind and alive is missing only where nobody is gone:
    it has time left.
    """
    why: dict[int, str] = {}
    notes: list[str] = []
    ends: dict[int, str] = {}
    stuck: set[int] = set()
    slow: set[int] = set()
    is_one_silent = False
    first = number
    for rank, answer in ask_each(others, lambda rank: ask(cards[rank], {}, timeout_s)):
        made = answer.get("links", {})
        behind = [(link, due) for link, due in links.get(rank, ()) if made.get(link, 0) < due]
        is_one_silent |= "silence" in answer
        first = min(first, answer.get("issued", 0) + 1) if "silence" not in answer else first
        is_in_call = answer.get("completed", 0) < answer.get("issued", 0)
        has_failed = str(answer.get("ended", "")).startswith("failed")
        if is_in_call or has_failed:
            stuck.add(rank)
        if "silence" in answer or (not links and answer.get("issued", 0) < number):
            why[rank] = reason(cards[rank], answer, number)
        elif behind:
            why[rank] = behind_text(cards[rank], answer, *behind[0])
        elif "ended" in answer and not is_late and not has_failed:
            why[rank] = f"{cards[rank]} has {answer['ended']}"  # came, and has left
        elif number and not links and answer.get("issued") == number and answer["op"] != op:
            notes.append(f"{cards[rank]} made call {number} as {answer['op']}")
        elif "ended" in answer:
            ends[rank] = f"{cards[rank]} has {answer['ended']}"
        if not ("silence" in answer or "ended" in answer):
            slow.add(rank)
    if is_one_silent:  # for whom those wait, or have waited, that are in an earlier call
        notes += [why.pop(rank) for rank in sorted(stuck & set(why))]
    is_over = bool(ends) or any(rank not in slow for rank in why)
    if not is_late and any(rank not in slow for rank in why):
        notes += [why.pop(rank) for rank in sorted(slow & set(why))]
    if ends and not why:  # else those ends are a consequence
        notes.append(ends[min(ends)])  # the others' are likely to say the same
    return Found(why, notes, is_over, 0 if is_one_silent else first)


def behind_text(card: Card, answer: Mapping[str, Any], link: str, due: int) -> str:
    """Return what is known of a rank that has not come to a call between two."""
    parts = [f"has made {answer.get('links', {}).get(link, 0)} of {due} calls from {link}"]
    if answer.get("issued"):
        parts.append(f"of those of all ranks {answer['issued']}, the last {answer['op']}")
    if "ended" in answer:
        parts.append(f"has {answer['ended']}")
    return f"{card} {', and '.join(parts)}"


def late_error(
    where: str,
    timeout_s: float | None,
    why: Mapping[int, str],
    notes: Sequence[str],
    op: str,
    number: int,
    rank: int,
) -> CommTimeoutError:
    """Return the error of a call that was not done in time.

    Parameters
    ----------
    where
        What it begins with.
    timeout_s
        The deadline that has passed; None: no time would have helped.
    why
        For each missing rank, what :func:`reason` says.
    notes
        What is to be said of others.
    op, number, rank
        As in the error.
    """
    when = "cannot be done" if timeout_s is None else f"was not done within {timeout_s:g} s"
    missing = sorted(why)
    if missing:
        said = [why[one] for one in missing]
        what_to_do = "see their logs for the reason, and if they are only slow, give"
    else:
        said = ["all ranks have come to it"]
        what_to_do = (
            "JITKERN_COMM_DEBUG=1 compares what they call; if GPUs are slow, or what was queued "
            "before, give"
        )
        if number == 0:  # no call that could be compared
            what_to_do = "if they are only slow, give"
    text = "; ".join([*said, *notes])
    return CommTimeoutError(
        f"{where} {when}: {text}; {what_to_do} a larger timeout_s",
        op=op,
        number=number,
        rank=rank,
        missing=missing,
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, indented, their first two columns aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), row[1].ljust(widths[1]), *row[2:]]) for row in rows
    ]
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def short(error: BaseException) -> str:
    """Return what the first line of an error says, cut: others will quote it."""
    line = (str(error).splitlines() or [repr(error)])[0].rstrip(":")
    line = _GLOO_PLACE.sub("", line).partition(_GLOO_ADVICE)[0]
    return line if len(line) <= _REASON_CHARS else f"{line[:_REASON_CHARS]} ..."
