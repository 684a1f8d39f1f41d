"""Admission rules of the rollout window, without waiting or messages.

Steps take groups in the order of entry, P groups each. With dynamic sampling a step drops the
groups whose rewards are all equal, and takes groups until it has kept P or has taken M. Let c_k be
the first group that step k takes; step k trains version k into k + 1. A group enters only if a step
that may still use it is certain to take it:

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

With carried groups, a step takes the first *finished* groups in the order of entry. The unfinished
ones among them are passed over: they are carried until a step takes them. Let h_k be the first
group such that no step before k took it or a later one, t_k how many groups those steps have taken,
and d how many untaken ones are known to be dropped. Then c = h_k - t_k groups are carried. A step
waits while it would leave more than C carried. Carried groups leave their room to others:

    group i enters   only if   i < C(v + S + 1)   where C(k) = h_k
                       and     i < t_k + (steps - k) P + d   unless c = 0

Groups in flight: version v is trained, so v <= k. When a group enters, the steps k to v + S may
take M each of those from h_k on, so at most (S + 1) M + C are untaken. Only entries raise their
number, so this always holds.

Lag of a group that is never passed over, where M = P: every step before its own takes P groups
older than it. At its entry there are fewer than (v + S + 1 - k) P + C of them. So its step j has
(j - k) P < (v + S + 1 - k) P + C, hence j - v <= S + ceil(C / P), which bounds the lag of its
tokens. Groups that are passed over have no bound: `max_token_age` leaves their old tokens out.

There is still no deadlock: when step k needs its groups, v >= k - 1, so as many have entered behind
the c carried ones as it can use, or all that the run has. It may pass over the carried ones.

The last steps wait for what is carried: where M = P, only P * steps groups enter, and each step
takes P. With dynamic sampling a step that reaches M keeps fewer than P groups, and only then may
groups that have entered be left at the end.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Sequence


class Window:
    """Counts admitted groups and pulled versions. `max_lag` 0 is synchronous.

    `start` steps are already trained, and the groups of `planned` further steps have already
    entered; together they have taken the groups before `taken`, `prompts_per_step` each by default,
    except those `carried`, which enter again first. A step takes at most `groups_per_step`, by
    default `prompts_per_step`.
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
        carried: Sequence[int] = (),
        groups_per_step: int | None = None,
    ) -> None:
        self._size, self._lag, self._steps = prompts_per_step, max_lag, steps
        self._most = groups_per_step or prompts_per_step
        self._step = start + planned
        self._first = self._step * prompts_per_step if taken is None else taken
        self._entered, self._again = self._first, deque(carried)
        self._taken = self._first - len(carried)
        self._version = start
        self._dropped: list[int] = []
        self._limit = self._reach()

    @property
    def version(self) -> int:
        """The version that every generator has pulled."""
        return self._version

    @property
    def next_group(self) -> int:
        """The first group such that no step has taken it or a later one."""
        return self._first

    @property
    def carried(self) -> int:
        """Number of groups that steps have passed over and none has taken."""
        return self._first - self._taken

    def may_enter(self) -> bool:
        return bool(self._again) or self._entered < self._limit

    def enter(self) -> int:
        """Admit a group and return its id; raise RuntimeError while `may_enter()` is False."""
        if not self.may_enter():
            raise RuntimeError(
                f"group {self._entered} may not enter at version {self._version} with max_lag "
                f"{self._lag}: wait until the generators have pulled the next version"
            )
        if self._again:
            return self._again.popleft()
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
        if not self._is_dropped(group_id):
            insort(self._dropped, group_id)
            self._limit = self._reach()

    def took(self, groups: Collection[int]) -> None:
        """Record that the next step has taken these groups, including those that it drops."""
        self._step, self._taken = self._step + 1, self._taken + len(groups)
        self._first = max(self._first, max(groups, default=-1) + 1)
        self._dropped = [group_id for group_id in self._dropped if group_id not in groups]
        self._limit = self._reach()

    def _is_dropped(self, group_id: int) -> bool:
        place = bisect_left(self._dropped, group_id)
        return self._dropped[place : place + 1] == [group_id]

    def _reach(self) -> int:
        """Return C(v + S + 1), at most the C of the end of the run."""
        first = self._first
        for _ in range(self._step, min(self._version + self._lag + 1, self._steps)):
            first = self._end_of(first)
        end = self._taken + (self._steps - self._step) * self._size + len(self._dropped)
        return min(first, end) if self.carried else first

    def _end_of(self, first: int) -> int:
        """Return the end of a step that starts at `first` and drops only the known groups."""
        end, further = first, first + self._size
        while further > end:
            end = further
            dropped = bisect_left(self._dropped, end) - bisect_left(self._dropped, first)
            further = min(first + self._size + dropped, first + self._most)
        return end
