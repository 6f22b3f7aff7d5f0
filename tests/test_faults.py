"""What happens when a rank dies, raises or stalls, a disk is full, a signal or a taken port comes.

Every launch ends by itself, says why, leaves no process behind, and what was finished is on disk.
"""
import dataclasses
import os
import shutil
import signal
import socket
import time

import pytest

from conftest import Launch, config, free_port, launch

RUNS = ("--random-weights", "--steps", 4, "--sweep", "stage=0,2")


def finish(launched, timeout=60):
    """Wait; no process may be left a moment later. The result is as of then: a launcher that gets
    SIGTERM itself ends before its ranks do."""
    result = launched.wait(timeout)
    end = time.monotonic() + 15
    while launched.processes() and time.monotonic() < end:
        time.sleep(0.2)
    left = [" ".join(process.cmdline()) for process in launched.processes()]
    launched.end()
    assert left == []
    return dataclasses.replace(launched.wait(), rc=result.rc, seconds=result.seconds)


def start(folder, model, *arguments, **options):
    return Launch(folder, "--config", config(folder), "--model", model, *arguments, **options)


def first_run_is_whole(result):
    run = result.record["runs"][0]
    assert run["name"] == "config stage=0" and run["error"] is None and len(run["steps"]) == 4
    assert run["median_step_seconds"] > 0 and run["peak_allocated_bytes"]["overall"] > 0


# Call 6 is step 2 of the second run.
@pytest.mark.parametrize("by, fault", [
    ("torchrun", "kill=step:1:6"), *[
        pytest.param(by, fault, marks=pytest.mark.slow) for by, fault in [
            ("deepspeed", "kill=step:1:6"), ("deepspeed", "raise=backward:1:6"),
            ("torchrun", "raise=backward:0:6"),
            *[("torchrun", f"kill={phase}:{rank}:6") for phase in ("forward", "backward", "step")
              for rank in (0, 1) if (phase, rank) != ("step", 1)]]]])
def test_a_rank_that_dies_ends_the_launch(tmp_path, small, by, fault):
    result = finish(start(tmp_path, small, *RUNS, by=by, patch=fault))
    assert result.rc != 0 and result.seconds < 60
    assert "injected: " in result.out + result.err
    first_run_is_whole(result)
    if fault.startswith("raise"):                              # ours: the traceback is shown
        assert "RuntimeError: injected fault" in result.out + result.err


@pytest.mark.slow                                          # torchrun waits 30 s for the other rank
def test_a_rank_that_stalls_ends_the_launch_with_a_message(tmp_path, small):
    result = finish(start(tmp_path, small, *RUNS, by="torchrun",
                          patch="timeout=8 stall=backward:1:6"), timeout=50)
    assert result.rc != 0
    first_run_is_whole(result)
    said = result.out + result.err
    assert "train_zero2: failed" in said and "rank" in said and "8 s" in said


@pytest.mark.parametrize("phase, rank", [
    pytest.param(f"{when}save_checkpoint", rank, marks=pytest.mark.slow)
    for when in ("", "after_") for rank in (0, 1)])
def test_killed_in_a_checkpoint_the_one_before_is_whole(tmp_path, small, phase, rank):
    arguments = ("--random-weights", "--steps", 4, "--checkpoint", tmp_path / "kept",
                 "--checkpoint-every", 2)
    result = finish(start(tmp_path, small, *arguments, by="torchrun",
                          patch=f"kill={phase}:{rank}:2"))
    assert result.rc != 0 and (tmp_path / "kept" / "latest").read_text().strip() == "step2"
    (tmp_path / "record.json").unlink(missing_ok=True)
    result = finish(start(tmp_path, small, *arguments, "--resume", by="torchrun"))
    assert result.rc == 0 and result.record["runs"][0]["resumed_from_step"] == 2


# --------------------------------------------------------------------------------- signals

LONG = ("--random-weights", "--sweep", "gradient_clipping=1,2,3", "--steps", 40)


@pytest.mark.parametrize("by, number, rc", [
    ("python", signal.SIGINT, 130),
    pytest.param("python", signal.SIGTERM, 130, marks=pytest.mark.slow),
    pytest.param("deepspeed", signal.SIGINT, 130, marks=pytest.mark.slow),
    pytest.param("torchrun", signal.SIGINT, 1, marks=pytest.mark.slow),
    pytest.param("torchrun", signal.SIGTERM, 1, marks=pytest.mark.slow),
    pytest.param("deepspeed", signal.SIGTERM, None, marks=pytest.mark.slow)])
def test_a_signal_in_a_sweep_ends_all_ranks_after_the_same_step(tmp_path, tiny, by, number, rc):
    launched = start(tmp_path, tiny, *LONG, by=by)
    launched.wait_for("gradient_clipping=2\nstep   1")         # in the second run
    os.killpg(launched.process.pid, number)                    # as a terminal or a scheduler does
    result = finish(launched)
    assert rc in (None, 128 - result.rc if result.rc < 0 else result.rc) and result.rc != 0
    first, second = result.record["runs"]
    assert len(first["steps"]) == 40 and 0 < len(second["steps"]) < 40
    assert second["error"] is None and second["peak_allocated_bytes"]["overall"] > 0
    assert result.verdicts["loss_falls"]["outcome"] == "PASS"
    assert "loss_falls" in result.out and "Traceback" not in result.out


def test_a_signal_leaves_a_checkpoint_to_go_on_from(tmp_path, tiny):
    launched = start(tmp_path, tiny, "--steps", 200, "--checkpoint", tmp_path / "kept", "--save",
                     tmp_path / "saved")
    launched.wait_for("step   4")
    launched.process.send_signal(signal.SIGTERM)
    result = finish(launched)
    assert result.rc == 130
    done = len(result.record["runs"][0]["steps"])
    assert "--save: nothing written" in result.out and not (tmp_path / "saved").exists()
    assert (tmp_path / "kept" / "latest").read_text().strip() == f"step{done}"
    result = finish(start(tmp_path, tiny, "--steps", done + 2, "--checkpoint", tmp_path / "kept",
                          "--resume"))
    assert result.rc == 0 and result.record["runs"][0]["resumed_from_step"] == done


def test_a_signal_before_training_ends_at_once(tmp_path, tiny):
    launched = start(tmp_path, tiny)
    time.sleep(2)                                              # while torch is imported
    launched.process.send_signal(signal.SIGINT)
    result = finish(launched, timeout=20)
    assert result.rc == 130 and "Traceback" not in result.err


# ---------------------------------------------------------------------------- disks and ports

@pytest.mark.parametrize("arguments, fault, word", [
    (["--steps", 200], "full=step:0:2", "--json"),             # a record of more than 20,000 bytes
    (["--steps", 4, "--plot", "p.png"], "full=step:0:2", "--plot p.png"),
    (["--steps", 4, "--save", "model"], "full=step:0:2", "--save model"),
    (["--steps", 4, "--checkpoint", "kept", "--checkpoint-every", 2], "full=save_checkpoint:0:2",
     "checkpoint of step 4")])
def test_a_full_disk_is_said_and_nothing_half_is_left(tmp_path, small, arguments, fault, word):
    result = finish(start(tmp_path, small, "--random-weights", *arguments, patch=fault))
    assert result.rc == 1 and "Traceback" not in result.err
    assert "failed" in result.out + result.err and word in result.out + result.err
    assert "step   4  loss" in result.out
    names = {path.name for path in tmp_path.iterdir()} - {"stdout", "stderr", "config.json"}
    if word == "--json":
        assert names == set(), "a part of the record is left"
    else:
        assert names <= {"record.json", "kept"}, "a part of a file is left"
        steps = result.record["runs"][0]["steps"]              # what was measured is on disk
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
    if "kept" in names:
        assert (tmp_path / "kept" / "latest").read_text().strip() == "step2"


@pytest.mark.skipif(not shutil.which("g++"), reason="--compile needs a C++ compiler")
def test_a_build_that_fails_is_said_in_one_line(tmp_path, small):
    result = finish(start(tmp_path, small, "--random-weights", "--steps", 1, "--compile",
                          patch="raise=compile:0:1"))
    assert result.rc == 1 and "Traceback" not in result.err
    assert result.record["runs"][0]["error"] == "--compile: cannot build: injected fault"
    path = config(tmp_path, compile={"deepcompile": True})
    result = launch(tmp_path, "--config", path, "--model", small, "--random-weights", "--compile",
                    ok=False)
    assert result.rc == 2 and "compile.deepcompile" in result.err and "a GPU" in result.err


def test_a_taken_port_is_said(tmp_path, small):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = finish(start(tmp_path, small, "--random-weights", env={
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port}), timeout=45)
    assert result.rc in (1, 2) and result.record is None
    assert result.err.startswith("train_zero2: ") and port in result.err
    assert "Traceback" not in result.err


def test_two_launches_at_once(tmp_path, small):
    launched = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        launched.append(start(tmp_path / name, small, "--random-weights", "--steps", 3))
    results = [finish(process, timeout=90) for process in launched]
    assert [result.rc for result in results] == [0, 0], results[0].err + results[1].err
    assert results[0].record["runs"][0]["steps"][2]["loss"] == pytest.approx(
        results[1].record["runs"][0]["steps"][2]["loss"], rel=1e-6)


@pytest.mark.slow                                          # torchrun waits 30 s for the other rank
def test_a_second_interrupt_ends_a_step_that_waits(tmp_path, small):
    launched = start(tmp_path, small, "--random-weights", "--steps", 200, by="torchrun",
                     patch="stall=forward:1:3")
    launched.wait_for("step   2")
    time.sleep(2)                                          # rank 0 is in step 3, for rank 1 to come
    [rank0] = [p for p in launched.processes() if p.environ().get("RANK") == "0"]
    rank0.send_signal(signal.SIGINT)
    time.sleep(2)
    rank0.send_signal(signal.SIGINT)
    assert finish(launched).rc == 1
    assert "train_zero2: interrupted" in launched.text("stderr")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(
    signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_a_rank_that_waits_for_another(tmp_path, small, number):
    launched = start(tmp_path, small, "--random-weights", env={
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port())})
    time.sleep(8)                                          # its imports take less
    launched.process.send_signal(number)
    begin = time.monotonic()
    assert finish(launched).rc == 130 and time.monotonic() - begin < 30
    assert "interrupted" in launched.text("stderr")


def test_outputs_leave_their_neighbours_alone(tmp_path, small):
    for name in ("record.json.part", "record.json.tmp"):
        (tmp_path / name).write_text("mine")
    finish(start(tmp_path, small, "--random-weights", "--steps", 1))
    assert {path.name: path.read_text() for path in tmp_path.glob("record.json.*")} == {
        "record.json.part": "mine", "record.json.tmp": "mine"}


def test_weights_are_saved_through_a_link(tmp_path, small):
    (tmp_path / "link").symlink_to(tmp_path / "there")
    result = finish(start(tmp_path, small, "--random-weights", "--steps", 1, "--save",
                          tmp_path / "link"))
    assert result.rc == 0 and (tmp_path / "there" / "model.safetensors").exists()


def test_a_lock_left_by_a_killed_build_is_not_waited_for(tmp_path, small):
    for name in ("deepspeed_shm_comm", "fused_adam", "cpu_adam"):
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "lock").touch()
    result = finish(start(tmp_path, small, "--random-weights", "--steps", 2, env={
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")}))
    assert result.rc == 0


def test_a_loss_that_is_not_finite_stops_with_an_explanation(tmp_path, small):
    result = finish(start(tmp_path, small, *RUNS, patch="nan=forward:0:6"))
    assert result.rc == 1
    first_run_is_whole(result)
    bad = result.record["runs"][1]
    assert "step 2" in bad["error"] and "not finite" in bad["error"]
    assert bad["error"] in result.out and "Traceback" not in result.err


def test_a_loss_scale_at_its_floor_stops_with_an_explanation(tmp_path, small):
    path = config(tmp_path, lr=900, fp16={"enabled": True, "initial_scale_power": 0})
    result = launch(tmp_path, "--config", path, "--model", small, "--random-weights", "--steps", 8,
                    ok=False, patch="fp16")
    [run] = result.record["runs"]
    assert result.rc == 1 and len(run["steps"]) < 8 and "at its floor" in run["error"]
    assert run["error"] in result.out and "Traceback" not in result.err


def test_always_overflow_marks_every_step_and_draws_nothing(tmp_path, small):
    path = config(tmp_path, fp16={"enabled": True, "loss_scale": 1e9})
    result = launch(tmp_path, "--config", path, "--model", small, "--random-weights", "--steps", 5,
                    ok=False, patch="fp16")
    [run] = result.record["runs"]
    assert result.rc == 1 and run["skipped_steps"] == 5
    assert not any(step["applied"] for step in run["steps"])
    assert run["median_step_seconds"] is None and run["tokens_per_second"] is None
    assert run["peak_allocated_bytes"]["steady"] is None
    verdict = result.verdicts["loss_falls"]
    assert verdict["outcome"] == "FAIL" and "skipped" in verdict["detail"]
    assert sum("skipped" in line for line in result.out.splitlines()
               if line.startswith("step ")) == 5
