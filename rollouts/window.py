"""Admission rules of the rollout window, without waiting or messages.

Steps take groups strictly in the order of entry, P groups each. With dynamic sampling a step drops
the groups whose rewards are all equal, and takes groups until it has kept P or has taken M. Let c_k
be the first group that step k takes; step k trains version k into k + 1. A group enters only if a
step that may still use it is certain to take it:

    group i enters   only if   i < C(v + S + 1)     v: the version every generator has pulled
                                                    C(k): c_k if, beyond the groups that are known
                                                          to be dropped, no further one is dropped

Without dynamic sampling M = P and C(k) = kP, and the rule is: i < (v + S + 1) P.

Proof that no token is older than S: a step that starts later or drops more groups ends no earlier,
so C(k) <= c_k, by induction over k. Group i entered with i < C(v + S + 1) <= c_(v + S + 1), so the
step k that takes it is before step v + S + 1: v >= k - S. Versions only grow while the group runs,
so each of its tokens has a version >= v >= k - S: the lag k - version is at most S. No short
episode overtakes a long one. For the same reason no group is sampled that no step takes.

The proof needs only that *every* generator has pulled v. A version may therefore be transferred
concurrently with a step: some generators serve v + 1 before `pulled` reports it, and their tokens
are only newer. No generator serves a version that is not trained, so no lag is below 0 either.

A run with S >= 1 does not deadlock if step k is trained concurrently with the sync of version k,
and a sync starts only when the previous one has ended. When step k needs its groups, v >= k - 1, so
all i < C(k + S) may enter, and C(k + S) >= C(k + 1): all that step k needs as far as is known, and
more once `drop` reports one of them. With S = 0 step k needs v = k: the sync precedes the step.

A run resumed after s trained steps admits groups from c_s on and starts at v = s: earlier groups
are taken, and the proof holds unchanged for the others. A group that the previous process had
finished entered at a version not above s, so it may enter now too; its tokens are from then, when
the proof held. If step s was already planned, its groups do not enter again (`planned`). One thing
breaks the proof with dynamic sampling: the file of a dropped group is damaged, and the group is
sampled anew and kept. Its step then ends earlier, so `step_groups` drops the groups that are too
old for theirs.
"""

from bisect import bisect_left, insort


class Window:
    """Counts admitted groups and pulled versions. `max_lag` 0 is synchronous.

    `start` steps are already trained, and the groups of `planned` further steps have already
    entered; together they have taken `taken` groups, `prompts_per_step` each by default. A step
    takes at most `groups_per_step`, by default `prompts_per_step`.
    """

    def __init__(
        self,
        prompts_per_step: int,
        max_lag: int,
        steps: int,
        start: int = 0,
        planned: int = 0,
        *,
        taken: int | None = None,
        groups_per_step: int | None = None,
    ) -> None:
        self._size, self._lag, self._steps = prompts_per_step, max_lag, steps
        self._most = groups_per_step or prompts_per_step
        self._step = start + planned
        self._first = self._step * prompts_per_step if taken is None else taken
        self._entered = self._first
        self._version = start
        self._dropped: list[int] = []
        self._limit = self._reach()

    @property
    def version(self) -> int:
        """The version that every generator has pulled."""
        return self._version

    def may_enter(self) -> bool:
        return self._entered < self._limit

    def enter(self) -> int:
        """Admit a group and return its id; raise RuntimeError while `may_enter()` is False."""
        if not self.may_enter():
            raise RuntimeError(
                f"group {self._entered} may not enter at version {self._version} with max_lag "
                f"{self._lag}: wait until the generators have pulled the next version"
            )
        self._entered += 1
        return self._entered - 1

    def pulled(self, version: int) -> None:
        """Record that every generator now serves `version`; versions only grow."""
        if version < self._version:
            raise ValueError(
                f"generators went from version {self._version} back to {version}: pull the newest"
            )
        self._version = version
        self._limit = self._reach()

    def drop(self, group_id: int) -> None:
        """Record that the step which takes this group will not train it, once or repeatedly."""
        if group_id >= self._first and not self._is_dropped(group_id):
            insort(self._dropped, group_id)
            self._limit = self._reach()

    def took(self, groups: int) -> None:
        """Record that the next step has taken so many groups, including those that it drops."""
        self._step, self._first = self._step + 1, self._first + groups
        del self._dropped[: bisect_left(self._dropped, self._first)]
        self._limit = self._reach()

    def _is_dropped(self, group_id: int) -> bool:
        place = bisect_left(self._dropped, group_id)
        return self._dropped[place : place + 1] == [group_id]

    def _reach(self) -> int:
        """Return C(v + S + 1), at most the C of the end of the run."""
        first = self._first
        for _ in range(self._step, min(self._version + self._lag + 1, self._steps)):
            first = self._end_of(first)
        return first

    def _end_of(self, first: int) -> int:
        """Return the end of a step that starts at `first` and drops only the known groups."""
        end, further = first, first + self._size
        while further > end:
            end = further
            dropped = bisect_left(self._dropped, end) - bisect_left(self._dropped, first)
            further = min(first + self._size + dropped, first + self._most)
        return end
