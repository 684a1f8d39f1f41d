"""Admission rules of the rollout window, without waiting or messages.

P groups make a step, and the step that takes groups kP to (k+1)P-1 trains version k into k+1. A
group enters only while the groups beyond those trained into the pulled version are at most S+1
steps' worth:

    group i enters   only if   i < (v + S + 1) P        v: the version every generator has pulled

Proof that no token is older than S: group i is trained at k = i // P, so i >= kP. It entered with
i < (v + S + 1) P, hence kP < (v + S + 1) P and v >= k - S. Versions only grow while the group
runs, so each of its tokens has a version >= v >= k - S: the lag k - version is at most S. Steps
take groups strictly in the order of entry, so no short episode overtakes a long one.

The proof needs only that *every* generator has pulled v. A version may therefore be transferred
concurrently with a step: some generators serve v + 1 before `pulled` reports it, and their tokens
are only newer. No generator serves a version that is not trained, so no lag is below 0 either.

A run with S >= 1 does not deadlock if step k is trained concurrently with the sync of version k,
and a sync starts only when the previous one has ended. When step k needs its groups, v >= k - 1, so
all i < (k + S) P may enter, and (k + S) P >= (k + 1) P. With S = 0 step k needs v = k: the sync
precedes the step.

A run resumed after s trained steps admits groups from sP on and starts at v = s: earlier groups are
trained, and the proof holds unchanged for the others. A group that the previous process had
finished entered at a version not above s, so it may enter now too; its tokens are from then, when
the proof held. If step s was already planned, its groups do not enter again (`planned`).
"""


class Window:
    """Counts admitted groups and pulled versions. `max_lag` 0 is synchronous.

    `start` steps are already trained, and the groups of `planned` further steps have already
    entered.
    """

    def __init__(
        self, prompts_per_step: int, max_lag: int, steps: int, start: int = 0, planned: int = 0
    ) -> None:
        self._size, self._lag = prompts_per_step, max_lag
        self._total = steps * prompts_per_step
        self._entered = (start + planned) * prompts_per_step
        self._version = start

    @property
    def version(self) -> int:
        """The version that every generator has pulled."""
        return self._version

    def may_enter(self) -> bool:
        limit = (self._version + self._lag + 1) * self._size
        return self._entered < min(limit, self._total)

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
