"""The rules of the rollout window, without waiting or messages.

P groups make a step, and the step that takes groups kP to (k+1)P-1 trains version k into k+1.
A group enters only while at most S+1 steps' worth of groups are not yet paid for by a pull:

    group i enters   only if   i < (v + S + 1) P        v: the version every generator has pulled

Proof that no token is older than S: group i is trained at k = i // P, so i >= kP. It entered with
i < (v + S + 1) P, hence kP < (v + S + 1) P and v >= k - S. Versions only grow while the group
runs, so each of its tokens has a version >= v >= k - S: the lag k - version is at most S. Steps
take groups strictly in the order of entry, so no short episode overtakes a long one.

The proof asks only that v is what *every* generator has pulled. So a version may be on its way
beside a step: some generators serve v + 1 before `pulled` says so, and their tokens are only newer.
Nobody serves a version that is not trained, so no lag is below 0 either.

Nor does a run with S >= 1 get stuck where step k is trained beside the sync of version k, and a
sync begins only when the one before it has ended. When step k wants its groups, v >= k - 1, so all
i < (k + S) P may enter, and (k + S) P >= (k + 1) P. With S = 0 step k needs v = k: the sync comes
before the step.

A run that goes on after s trained steps enters groups from sP on and begins at v = s: the groups
before are trained, and the proof reads the same for those that are not. A group that the former
process had finished entered at a version of then, which was not above s, so it may enter now too;
its tokens are those of then, for which the proof was true then. Where step s was planned already,
its groups do not enter again (`planned`).
"""


class Window:
    """Counts groups in and versions out. `max_lag` 0 is synchronous; `start` steps are done.

    The groups of as many steps more as are `planned` have entered before.
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
        """What every generator has pulled."""
        return self._version

    @property
    def exhausted(self) -> bool:
        """True when every group of the run has entered."""
        return self._entered >= self._total

    def may_enter(self) -> bool:
        limit = (self._version + self._lag + 1) * self._size
        return self._entered < min(limit, self._total)

    def enter(self) -> int:
        """The id of the next group; raises RuntimeError while `may_enter()` is False."""
        if not self.may_enter():
            raise RuntimeError(
                f"group {self._entered} may not enter at version {self._version} with max_lag "
                f"{self._lag}: wait until the generators have pulled the next version"
            )
        self._entered += 1
        return self._entered - 1

    def pulled(self, version: int) -> None:
        """Every generator serves `version` from now on; versions only grow."""
        if version < self._version:
            raise ValueError(
                f"generators went from version {self._version} back to {version}: pull the newest"
            )
        self._version = version
