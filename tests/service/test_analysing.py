"""The analysis process: one at a time, off the API's process, never left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from service.analysing import Analyser, AnalysisResult, AnalysisTask
from tests.service.helpers import dying, echo, endless

TASK = AnalysisTask("s1", 1, "/nowhere", "{}", {}, None, {})

_PARENT = """
import sys, time
from service.analysing import Analyser, AnalysisTask
from tests.service.helpers import echo
if __name__ == "__main__":
    analyser = Analyser(60, echo)
    analyser.start(AnalysisTask("s1", 1, "/nowhere", "{}", {}, None, {}))
    while analyser.poll() is None:
        time.sleep(0.01)
    print(analyser._process.pid, flush=True)
    time.sleep(600)
"""


def finish(analyser: Analyser) -> AnalysisResult:
    deadline = time.monotonic() + 60
    while (result := analyser.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def test_a_worker_is_kept_for_the_next_task():
    analyser = Analyser(60, echo)
    try:
        for name in ("s1", "s2"):
            analyser.start(AnalysisTask(name, 1, "/nowhere", "{}", {}, None, {}))
            assert analyser.busy_with == name
            with pytest.raises(RuntimeError, match="one analysis at a time"):
                analyser.start(TASK)
            result = finish(analyser)
            assert result.error is None
            assert result.verdict is not None
            assert result.verdict[0]["study_id"] == name
            assert analyser.busy_with is None
            pid = analyser._process.pid
        assert analyser._process.pid == pid != os.getpid()
    finally:
        analyser.close()


def test_a_worker_that_left_is_replaced():
    analyser = Analyser(60, echo)
    try:
        analyser.start(TASK)
        finish(analyser)
        analyser._process.kill()
        analyser._process.join()
        analyser.start(TASK)
        assert finish(analyser).error is None
    finally:
        analyser.close()


@pytest.mark.parametrize("function", [endless, dying])
def test_closing_leaves_no_process(function: Callable[[AnalysisTask], object]):
    analyser = Analyser(60, function)
    analyser.start(TASK)
    pid = analyser._process.pid
    analyser.close()
    assert not psutil.pid_exists(pid)
    assert analyser.busy_with is None


def test_a_service_that_is_killed_takes_its_worker_along(tmp_path: Path):
    root = Path(__file__).parents[2]
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs([worker], timeout=30)[1] == []
