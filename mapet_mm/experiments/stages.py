"""Run a chain of command lines as stages: side by side where they can, resumable, each with its log."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import runpy
import shlex
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from mmengine.config import Config

from mapet_mm import __version__
from mapet_mm.errors import UserError
from mapet_mm.file_replacement import replace_file

TAIL_LINES = 20
POLL_SECONDS = 0.2
REPORT_SECONDS = 30


class StageError(UserError, RuntimeError):
    """A stage that failed or stages that cannot be run; the message says where the log is."""


@dataclass(frozen=True)
class Stage:
    """One command line of a chain.

    Args:
        name: short and unique; its log and stamp are named after it.
        command: a Python script and its arguments, as typed after `python`.
        outputs: files or folders that exist once it is done.
        needs: names of the stages whose outputs it takes.
        disposable: whether outputs of another recipe are removed before it runs; otherwise its tool decides.
        kind: stages of one kind take about the same time; the time left is estimated from it.
    """

    name: str
    command: Sequence[str]
    outputs: Sequence[str]
    needs: Sequence[str] = ()
    disposable: bool = True
    kind: str = ""

    @property
    def line(self) -> str:
        """The exact equivalent command line."""
        return shlex.join(["python", *self.command])


@dataclass
class _Running:
    stage: Stage
    process: BaseProcess
    started: float = field(default_factory=time.monotonic)
    reported: float = field(default_factory=time.monotonic)


class StageRunner:
    """Runs stages in forked children of this process, so that heavy imports are paid once.

    A finished stage leaves a stamp with a key made of its command, the configs it names, the keys of the
    stages that it needs and the package's version; a later run skips it while the key is the same and its
    outputs exist. A stage that was killed runs again with its outputs in place, so a tool that resumes does.
    When the key has changed, what the old recipe made is removed first.

    Args:
        stages: the chain, each after the ones that it needs.
        folder: where `stamps/` and `logs/` are kept.
        jobs: how many stages may run side by side, each with one thread: threads that wait for each other
            on a busy machine are slower than one, and the results do not depend on the number of cores.
        tell: takes each line of progress.
        keep_going: whether the stages that do not need a failed one still run.
        on_done: called with each stage that this runner completes.

    Raises:
        StageError: a name occurs twice, or a stage needs one that does not come before it.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        folder: str | os.PathLike,
        jobs: int,
        tell: Callable[[str], None] = print,
        keep_going: bool = False,
        on_done: Callable[[Stage], None] | None = None,
    ) -> None:
        self.stages, self.jobs, self.tell = list(stages), jobs, tell
        self.keep_going, self.on_done = keep_going, on_done
        self.failed: dict[str, str] = {}
        self.stamps, self.logs = Path(folder) / "stamps", Path(folder) / "logs"
        self.keys: dict[str, str] = {}
        configs: dict[str, dict] = {}
        for stage in self.stages:
            if stage.name in self.keys:
                raise StageError(f"stage `{stage.name}` occurs twice")
            unknown = [name for name in stage.needs if name not in self.keys]
            if unknown:
                raise StageError(f"stage `{stage.name}` needs `{unknown[0]}`, which does not come before it")
            self.keys[stage.name] = _key(stage, [self.keys[name] for name in stage.needs], configs)

    def run(self, preload: Iterable[str] = (), only: Container[str] | None = None) -> None:
        """Run what is not done yet; on failure or Ctrl-C the other stages are stopped, and a new run resumes.

        Args:
            preload: modules to import here before the first fork.
            only: names of the stages to run, with all that they need; None runs all.

        Raises:
            StageError: a stage failed; the message has the end of its log and the log's path. With
                `keep_going`, raised when all others are done.
        """
        wanted = [stage for stage in self.stages if only is None or stage.name in only]
        done = {stage.name for stage in wanted if self.is_done(stage)}
        for stage in wanted:
            if stage.name in done:
                self.tell(f"[{self._place(stage)}] {stage.name}: done before, {self.seconds(stage):.0f} s")
        waiting = [stage for stage in wanted if stage.name not in done]
        if waiting:
            _import_all(preload)
        running: list[_Running] = []
        try:
            while waiting or running:
                self._start_ready(waiting, running, done)
                time.sleep(POLL_SECONDS)
                self._collect(waiting, running, done)
                self._report(running)
        finally:
            _stop(running)
        if self.failed:
            raise StageError("\n".join(self.failed.values()))

    def is_done(self, stage: Stage) -> bool:
        """Whether the stage was completed with this command and these configs, and its outputs exist."""
        stamp = self._stamp(stage)
        complete = stamp.get("key") == self.keys[stage.name] and "seconds" in stamp
        return complete and all(Path(output).exists() for output in stage.outputs)

    def seconds(self, stage: Stage) -> float:
        """Seconds that the completed stage took (its last start only, if it was interrupted)."""
        return self._stamp(stage)["seconds"]

    def mark_done(self, stage: Stage, seconds: float) -> None:
        """Note that a stage was completed in so many seconds."""
        self._write_stamp(stage, seconds)

    def log(self, stage: Stage) -> Path:
        """The stage's log file."""
        return self.logs / f"{stage.name}.log"

    def _start_ready(self, waiting: list[Stage], running: list[_Running], done: set[str]) -> None:
        ready = [stage for stage in waiting if done.issuperset(stage.needs)]
        for stage in ready[: self.jobs - len(running)]:
            waiting.remove(stage)
            self._prepare(stage)
            self.tell(f"[{self._place(stage)}] {stage.name}: {stage.line}")
            arguments = (list(stage.command), self.log(stage), os.getpid())
            process = multiprocessing.get_context("fork").Process(target=_run_command, args=arguments)
            process.start()
            running.append(_Running(stage, process))

    def _collect(self, waiting: list[Stage], running: list[_Running], done: set[str]) -> None:
        for one in [one for one in running if not one.process.is_alive()]:
            running.remove(one)
            stage, seconds = one.stage, time.monotonic() - one.started
            missing = [output for output in stage.outputs if not Path(output).exists()]
            if one.process.exitcode or missing:
                self._fail(stage, self._failure(stage, one.process.exitcode, missing), waiting)
                continue
            self.mark_done(stage, seconds)
            done.add(stage.name)
            left = self._seconds_left([*waiting, *(other.stage for other in running)])
            self.tell(f"[{self._place(stage)}] {stage.name}: done in {seconds:.0f} s{left}")
            if self.on_done is not None:
                self.on_done(stage)

    def _fail(self, stage: Stage, message: str, waiting: list[Stage]) -> None:
        """Note a failure and drop what needs the stage, or stop at once."""
        if not self.keep_going:
            raise StageError(message)
        self.failed[stage.name] = message
        self.tell(f"[{self._place(stage)}] {message}")
        for other in list(waiting):
            if broken := [name for name in other.needs if name in self.failed]:
                waiting.remove(other)
                self.failed[other.name] = f"stage `{other.name}` did not run: it needs `{broken[0]}`"

    def _seconds_left(self, stages: Sequence[Stage]) -> str:
        """How long these stages will take, from the mean of those of their kind, or of all, that are done."""
        taken: dict[str, list[float]] = {}
        for stage in self.stages:
            if self.is_done(stage):
                for kind in (stage.kind, None):
                    taken.setdefault(kind, []).append(self.seconds(stage))
        expected = [taken.get(stage.kind, taken[None]) for stage in stages]
        seconds = sum(sum(times) / len(times) for times in expected) / self.jobs
        return f"; about {seconds / 60:.0f} min left for {len(stages)} more" if stages else ""

    def _report(self, running: list[_Running]) -> None:
        for one in running:
            now = time.monotonic()
            if now - one.reported >= REPORT_SECONDS:
                one.reported = now
                # MMEngine puts time, logger and level before its message.
                state = " ".join(_tail(self.log(one.stage), 1)).rsplit(" - INFO - ", 1)[-1]
                self.tell(
                    f"        {one.stage.name}, {now - one.started:.0f} s: {' '.join(state.split())[:90]}"
                )

    def _failure(self, stage: Stage, exit_code: int | None, missing: list[str]) -> str:
        reason = f"ended with code {exit_code}" if exit_code else f"did not write {', '.join(missing)}"
        tail = "\n".join(f"  | {line}" for line in _tail(self.log(stage), TAIL_LINES))
        return (
            f"stage `{stage.name}` {reason}; the end of its log:\n{tail}\n"
            f"The whole log is {self.log(stage)}. Correct the cause and run the same command again: "
            "stages that are done are skipped, this one resumes."
        )

    def _prepare(self, stage: Stage) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        stamp = self._stamp(stage)
        if stage.disposable and stamp and stamp["key"] != self.keys[stage.name]:
            for output in stage.outputs:
                _remove(Path(output))
        self._write_stamp(stage, seconds=None)

    def _place(self, stage: Stage) -> str:
        return f"{self.stages.index(stage) + 1:2d}/{len(self.stages)}"

    def _stamp(self, stage: Stage) -> dict:
        file = self.stamps / f"{stage.name}.json"
        return json.loads(file.read_text()) if file.is_file() else {}

    def _write_stamp(self, stage: Stage, seconds: float | None) -> None:
        self.stamps.mkdir(parents=True, exist_ok=True)
        stamp = {"command": stage.line, "key": self.keys[stage.name]}
        if seconds is not None:
            stamp["seconds"] = seconds
        replace_file(self.stamps / f"{stage.name}.json", (json.dumps(stamp, indent=1) + "\n").encode())


def _key(stage: Stage, needed: Sequence[str], configs: dict[str, dict]) -> str:
    """Digest of what decides a stage's outputs: command, configs in full, what it builds on, the version.

    `configs` keeps those that were read: a fifth of a second each.
    """
    paths = [word for word in stage.command[1:] if word.endswith(".py")]
    for path in paths:
        if path not in configs:
            configs[path] = Config.fromfile(path).to_dict()
    named = [configs[path] for path in paths]
    recipe = json.dumps([__version__, list(stage.command), named, list(needed)], default=str, sort_keys=True)
    return hashlib.sha256(recipe.encode()).hexdigest()


def _import_all(modules: Iterable[str]) -> None:
    # Asking for a device through the driver's own library keeps CUDA usable in forked children.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            importlib.import_module(module)


def _run_command(command: list[str], log: Path, parent: int) -> None:
    """In the child: become `python command...`, with the output in the log."""
    # A process group of its own: Ctrl-C reaches the runner alone, which stops this stage and its workers.
    os.setpgrp()
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    print(f"$ {shlex.join(['python', *command])}")
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def _follow(parent: int) -> None:
    """End with the runner, even when it is killed: a new run must not find the old stage still writing."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _stop(running: Sequence[_Running]) -> None:
    for one in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGTERM)
        one.process.terminate()
    for one in running:
        one.process.join(10)
        if one.process.is_alive():
            one.process.kill()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _tail(file: Path, count: int) -> list[str]:
    text = file.read_text(errors="replace") if file.is_file() else ""
    # A progress bar redraws its line after carriage returns; the last state is the one to show.
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.rstrip("\n").split("\n")][-count:]
