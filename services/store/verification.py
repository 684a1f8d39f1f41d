"""Verification of a run directory: each file of `CHECKED`, every row and reference.

Reads these and changes nothing. Each finding states what a resume would do about it;
`verify_command` prints findings.

The `composer-mesh verify` command: prints the faults of a run directory, one per line.
"""

import errno
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from composer_mesh.actors.checkpoints.folder import checkpoints_of
from composer_mesh.actors.checkpoints.manifest import damage
from composer_mesh.actors.sqlite_file import StoreError, damage_of
from composer_mesh.mesh.open_folder import refuse_links
from composer_mesh.mesh.untrusted_json import short_reason
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.file_checksums import (
    CHECKSUMS_FILE,
    difference,
    read_checksums,
)
from composer_mesh.services.directory.report import (
    EVALUATIONS_FILE,
    HINT_TEMPLATES_FILE,
    METRICS_FILE,
    STORE_FILE,
    SUMMARY_FILE,
    TIMELINE_FILE,
    read_metrics,
)
from composer_mesh.services.directory.status import goes_on
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.store.group_files import FOLDER, read_group
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.records import NO_ROW, index_row, orphans, unindexed
from composer_mesh.services.store.row_values import stored_pair
from composer_mesh.services.store.rows import DamagedRecord, GroupRow, GroupState
from composer_mesh.services.store.schema import COLUMNS, WHY, damaged_rows
from composer_mesh.services.store.schema import REPAIR as NEW_RUN
from composer_mesh.services.store.writing import CONFIG_FILE, EVENTS_FILE, POISONED_FILE

CONTINUES = "train --resume moves it to quarantine/ and continues without it"
AGAIN = "train --resume moves it to quarantine/ and samples the group again"
TRAINED = "train --resume continues, from the step before where it must be trained again"
WAITS = "train --resume keeps the reward until the rollout is sampled again, or lets it expire"
COPIES = "train --resume makes it again from run.sqlite"
FROM_A_COPY = "take it from a copy of the run, or leave it: no part of a run reads it"
LINK = "remove the link, or replace it by its target"
READ = "correct its permissions"
AGAIN_WRITTEN = "train --resume writes it again"
LINES = (EVENTS_FILE, TIMELINE_FILE)
WHOLE = {
    CONFIG_FILE: AGAIN_WRITTEN,
    HINT_TEMPLATES_FILE: AGAIN_WRITTEN,
    SUMMARY_FILE: "a run writes it again at its end",
}
CHECKED = (
    *("*.sqlite", "traces/", "checkpoints/", METRICS_FILE, EVALUATIONS_FILE),
    *(POISONED_FILE, *LINES, *WHOLE),
)
NOT_CHECKED = "logs, status, signatures, pictures, trackers' files and quarantine/"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault in a run directory. `kind` is missing, damaged, orphaned or differs."""

    kind: str
    where: str
    why: str
    repair: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.why}: {self.repair}"


def verify_run(root: Path, live: bool = False) -> list[Finding]:
    """Return the faults of a run directory; empty if it is intact.

    In a `live` run, states that its writer may be about to change are not reported. Where a link
    leads out of the directory, nothing is checked, and that is the finding. Raises StoreMissing if
    there is no store.
    """
    if outward := list(_outward_links(root)):
        return outward
    found = [
        Finding("damaged", path.name, wrong, NEW_RUN if path.name == STORE_FILE else _repair(path))
        for path in sorted(root.glob("*.sqlite"))
        if (wrong := damage_of(path))
    ]
    if not any(one.where == STORE_FILE for one in found):
        found += _store(root, live)
    return [*found, *_files(root, live), *_checkpoints(root)]


def _outward_links(root: Path) -> Iterator[Finding]:
    try:
        refuse_links(root)
    except FileNotFoundError:
        pass  # there is no run, or its writer has just removed a folder
    except OSError as error:
        where = os.path.relpath(str(error.filename), root)
        is_link = error.errno == errno.ELOOP
        why = "it leads out of the directory" if is_link else f"it cannot be read: {error.strerror}"
        yield Finding("damaged", where, f"{why}, so nothing was checked", LINK if is_link else READ)


def _repair(path: Path) -> str:
    return f"move {path.name} away: its contents are queried or counted again"


def _store(root: Path, live: bool) -> list[Finding]:
    try:
        with RunReader(root) as reader:
            if rows := list(_rows(reader)):  # damaged rows cannot be compared with anything
                return rows
            found = [*_groups(root, reader), *_references(reader), *_rewards(reader)]
            return found if live else [*found, *_left(root, reader)]
    except StoreError as error:
        return [Finding("damaged", STORE_FILE, error.reason, NEW_RUN)]
    except DamagedRecord as error:
        return [Finding("damaged", STORE_FILE, str(error), NEW_RUN)]


def _rows(reader: RunReader) -> Iterator[Finding]:
    for row in damaged_rows(reader.file):
        repair = NEW_RUN if row.table == "steps" else CONTINUES
        yield Finding("damaged", str(row), WHY, repair)


def _groups(root: Path, reader: RunReader) -> Iterator[Finding]:
    """Verify every group file, and that the index matches it."""
    for row in reader.groups():
        try:
            if row.traces:
                yield from _compared(root, reader, row)
        except DamagedRecord as error:
            missing = not Path(error.where).exists()
            where = str(Path(error.where).relative_to(root))
            repair = TRAINED if row.state == GroupState.TRAINED else AGAIN
            yield Finding("missing" if missing else "damaged", where, error.why, repair)
    for row in unindexed(reader):
        where, why = f"index of group {row.group_id}", f"it has not {row.traces} rollouts"
        yield Finding("differs", where, why, "train --resume makes it again from the group's file")


def _compared(root: Path, reader: RunReader, row: GroupRow) -> Iterator[Finding]:
    traces = read_group(root, row.group_id, row.bytes, row.crc)
    with reader.file.reading() as rows:
        select = f"SELECT {COLUMNS['traces']} FROM traces WHERE group_id = ?"
        found = {one[0]: one for one in rows.execute(select, (row.group_id,))}
    for trace in traces:
        if (indexed := found.get(trace.trace_id)) is not None and indexed != index_row(trace):
            why = "the index differs from its file"
            yield Finding("differs", f"rollout {trace.trace_id}", why, NEW_RUN)


def _references(reader: RunReader) -> Iterator[Finding]:
    """Verify that trained groups, pairs and late rewards refer to what is there."""
    steps = {step.step for step in reader.steps()}
    for row in reader.groups(GroupState.TRAINED):
        if row.trained is None or row.trained - 1 not in steps:
            why = f"it was trained as version {row.trained}, which no step has made"
            yield Finding("missing", f"step of group {row.group_id}", why, NEW_RUN)
    for pair in reader.pairs():
        stored_pair(pair)
        if pair.step is not None and pair.step not in steps:
            why = f"it was {pair.state} in step {pair.step}, which is not there"
            yield Finding("missing", f"step of pair {pair.pair_id}", why, NEW_RUN)


def _rewards(reader: RunReader) -> Iterator[Finding]:
    """Verify that late rewards are of stored rollouts, and were used by existing steps."""
    steps, rewards = {step.step for step in reader.steps()}, reader.rewards(state=None)
    stored = reader.stored({one.trace_id for one in rewards})
    for one in rewards:
        if one.trace_id not in stored:
            why = f"{one.source or 'nobody'} has posted {one.reward:g} for it"
            yield Finding("missing", f"rollout {one.trace_id}", why, WAITS)
        if one.step is not None and one.step not in steps:
            where, why = f"step of reward {one.place}", f"it was {one.state} in step {one.step}"
            yield Finding("missing", where, f"{why}, which is not there", NEW_RUN)


def _left(root: Path, reader: RunReader) -> Iterator[Finding]:
    """Report what a stop leaves behind and a resume cleans up."""
    for path in orphans(root, reader):
        yield Finding("orphaned", str(path.relative_to(root)), NO_ROW, CONTINUES)
    for draft in sorted(root.glob(f"{FOLDER}/*/.*")):
        why = "its writer was stopped"
        yield Finding("orphaned", str(draft.relative_to(root)), why, "train --resume removes it")
    evaluations = [asdict(one) for one in reader.evaluations()]
    copies = {METRICS_FILE: [*reader.metrics()], EVALUATIONS_FILE: evaluations}
    copies[POISONED_FILE] = reader.poisoned()
    for name, rows in copies.items():
        try:
            same = read_metrics(root / name) == rows
        except RunDirectoryError:
            same = False
        if not same:
            yield Finding("differs", name, "it is not what run.sqlite says", COPIES)


def _files(root: Path, live: bool) -> Iterator[Finding]:
    """Compare files with the checksums that were written with them."""
    try:
        noted = read_checksums(root)
    except (OSError, ValueError) as error:
        why = f"it cannot be read: {short_reason(error)}"
        yield Finding("damaged", CHECKSUMS_FILE, why, AGAIN_WRITTEN)
        return
    for name, one in noted.items():
        if live and name in WHOLE:
            continue
        if name not in (*LINES, *WHOLE):
            yield Finding("damaged", CHECKSUMS_FILE, f"it names {name[:80]!r}", AGAIN_WRITTEN)
            continue
        repair = WHOLE.get(name, FROM_A_COPY)
        try:
            if why := difference(root / name, one, grows=name in LINES):
                yield Finding("damaged", name, why, repair)
        except FileNotFoundError:
            yield Finding("missing", name, f"{one.size} bytes were written", repair)
        except OSError as error:
            yield Finding("damaged", name, f"it cannot be read: {error.strerror}", repair)


def _checkpoints(root: Path) -> Iterator[Finding]:
    for checkpoint in checkpoints_of(root):
        where = str(checkpoint.folder.relative_to(root))
        repair = "train --resume moves it to quarantine/ and begins at the one before"
        for line in damage(checkpoint.folder):
            yield Finding("damaged", where, line, repair)


def verify_command(run: Path, as_json: bool = False) -> int:
    """Print the findings; return exit status 1 if there are any."""
    found = verify_run(run, live=goes_on(run))
    if as_json:
        findings = [asdict(one) for one in found]
        sys.stdout.write(json.dumps({"run": str(run), "findings": findings}, indent=2) + "\n")
        return int(bool(found))
    for one in found:
        sys.stdout.write(plain_text(str(one)) + "\n")
    if not found:
        checked = f"{', '.join(CHECKED)} are as they were written"
        sys.stdout.write(f"{run}: {checked}; not checked: {NOT_CHECKED}\n")
    return int(bool(found))
