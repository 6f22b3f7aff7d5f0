"""Run train_zero2.main() with the patches named in TRAIN_ZERO2_PATCH, separated by spaces.

fp16                     the accelerator says that it can do fp16, so fp16 arithmetic runs on a CPU
no-repair                stage 0 stays as DeepSpeed ships it
timeout=SECONDS          how long a collective waits for a rank that stalls
log=FOLDER               token ids and labels of each forward, one JSON line each, by rank
warnings=FILE            warnings that the script itself is the cause of, one line each
KIND=PHASE:RANK:CALL     a fault before that rank's CALLth forward, backward, step or
                         save_checkpoint of the engine, or after it with after_PHASE (calls count
                         through the launch); KIND is kill, raise, stall, nan (in the weights) or
                         full, for a disk on which no file can grow beyond 20,000 bytes
"""
import datetime
import json
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_zero2  # noqa: E402

RANK = int(os.environ.get("RANK", 0))


def beside(phase, action):
    """Call action(engine, number of the call, arguments) before or after each engine.phase()."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    name, calls = phase.removeprefix("after_"), []
    method = getattr(DeepSpeedEngine, name)

    def patched(self, *args, **kwargs):
        calls.append(name)
        if name == phase:
            action(self, len(calls), args)
        result = method(self, *args, **kwargs)
        if name != phase:
            action(self, len(calls), args)
        return result
    setattr(DeepSpeedEngine, name, patched)


def fault(kind, phase, rank, call):
    def act(engine, number, _):
        if (RANK, number) != (int(rank), int(call)):
            return
        print(f"injected: {kind} in {phase} on rank {rank}", file=sys.stderr, flush=True)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stall":
            time.sleep(3600)
        elif kind == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        elif kind == "nan":
            next(engine.module.parameters()).data.fill_(float("nan"))
        else:
            raise RuntimeError("injected fault")
    beside(phase, act)


def log(folder):
    def write(engine, number, tensors):
        with open(Path(folder) / f"rank{RANK}.jsonl", "a") as file:
            file.write(json.dumps([t.tolist() for t in tensors]) + "\n")
    beside("forward", write)


def watch_warnings(path):
    """Write down each warning whose nearest caller outside of torch and transformers is ours."""
    def show(message, category, *_, **__):
        frame = sys._getframe(1)
        while frame and any(part in frame.f_code.co_filename for part in (
                "/torch/", "/transformers/", "warnings.py", "launch_patched.py", "contextlib.py")):
            frame = frame.f_back
        if frame and frame.f_code.co_filename == train_zero2.__file__:
            with open(path, "a") as file:
                file.write(f"{frame.f_lineno}: {category.__name__}: {message}\n")
    warnings.showwarning = show


def patch(word):
    name, _, value = word.partition("=")
    if name == "fp16":
        from deepspeed.accelerator import get_accelerator
        type(get_accelerator()).is_fp16_supported = lambda self: True
    elif name == "no-repair":
        train_zero2.repair_baseline = lambda *args, **kwargs: []
    elif name == "timeout":
        train_zero2.COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=int(value))
    elif name == "log":
        log(value)
    elif name == "warnings":
        watch_warnings(value)
    else:
        fault(name, *value.split(":"))


if __name__ == "__main__":
    for word in os.environ["TRAIN_ZERO2_PATCH"].split():
        patch(word)
    sys.exit(train_zero2.main())
