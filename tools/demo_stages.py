"""Runs the demo's commands that are not done yet, several at a time, each with a log."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mapet_mm.utils.atomic_files import replace_json
from mapet_mm.utils.config import VARIABLE
from mapet_mm.utils.errors import UserError
from mapet_mm.visualization.training_log import last_values

LOG_LINES = 20  # of a stage that failed


@dataclass
class Stage:
    """A command. It is done once its output exists and its result is written."""

    name: str
    folder: Path  # of its log and its result; a training's work dir
    command: Sequence[str]  # as typed after `python`
    output: Path
    needs: "Sequence[Stage]" = ()
    data: str = "digits"  # the dataset that its config is read for
    metric: str | None = None
    process: subprocess.Popen | None = None
    started: float = 0.0

    @property
    def line(self) -> str:
        """The command as typed in a shell."""
        variable = "" if self.data == "digits" else f"{VARIABLE}={self.data} "
        return variable + shlex.join(["python", *self.command])

    @property
    def log(self) -> Path:
        return self.folder / "run.log"

    @property
    def result_file(self) -> Path:
        return self.folder / "result.json"

    @property
    def result(self) -> dict[str, float]:
        """The `seconds` that the command took and, if it has a metric, its last `value`."""
        return json.loads(self.result_file.read_text())

    @property
    def is_done(self) -> bool:
        return self.result_file.is_file() and self.output.exists()

    def start(self) -> None:
        """Start the command, in one thread."""
        if self.metric:
            # An interrupted evaluation starts anew: its last checkpoint may be there and not yet validated.
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: self.data}
        words = [sys.executable, "-W", "ignore", *self.command]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        self.started = time.monotonic()

    def finish(self) -> None:
        """Write the result of the command, which has ended; raise UserError if it failed."""
        code = self.process.returncode
        if code or not self.output.exists():
            problem = f"ended with code {code}" if code else f"did not write {self.output}"
            last_lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise UserError(
                f"stage `{self.name}` {problem}; the end of its log {self.log}:\n"
                + "\n".join(f"  | {line}" for line in last_lines)
                + "\nCorrect the cause and run the same command again"
            )
        result = {"seconds": round(time.monotonic() - self.started, 1)}
        if self.metric:
            result["value"] = last_values(self.folder)[self.metric]
        replace_json(self.result_file, result)


def run_stages(stages: Sequence[Stage], jobs: int) -> None:
    """Run the stages that are not done, each after those that it needs, up to `jobs` at a time.

    On an error or a signal the running ones are ended.

    Raises:
        UserError: a stage failed.
    """
    waiting = [stage for stage in stages if not stage.is_done]
    running: list[Stage] = []
    if len(waiting) < len(stages):
        print(f"{len(stages) - len(waiting)} of {len(stages)} stages were done before")
    try:
        while waiting or running:
            ready = [stage for stage in waiting if all(need.is_done for need in stage.needs)]
            for stage in ready[: jobs - len(running)]:
                waiting.remove(stage)
                print(f"[{1 + stages.index(stage):2d}/{len(stages)}] {stage.line}", flush=True)
                stage.start()
                running.append(stage)
            time.sleep(0.1)
            for stage in [stage for stage in running if stage.process.poll() is not None]:
                running.remove(stage)
                stage.finish()
                left = len(waiting) + len(running)
                print(f"        {stage.name}: {stage.result['seconds']:.0f} s; {left} to go", flush=True)
    finally:
        for stage in running:
            stage.process.terminate()
        for stage in running:
            stage.process.wait()
