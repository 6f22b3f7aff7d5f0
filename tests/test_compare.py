"""Verdicts and recommendation over records made by hand; the memory model against measurements."""
import json
from unittest import mock

import pytest

from conftest import STAGE0, ZERO2
from train_zero2 import (Launch, Run, RunFailed, check_config, check_fits, compare, expected_bytes,
                         groups_by, plot, recommend, unflatten)

MB = 1e6
LOSSES = (10.0, 9.0, 8.0, 7.0, 6.0)
BUCKET, ALLGATHER, OVERLAP = (f"zero_optimization.{name}" for name in (
    "reduce_bucket_size", "allgather_bucket_size", "overlap_comm"))


def resolved(path, ranks=2, **zero):
    """A shipped config, resolved, with keys of zero_optimization set."""
    config = json.loads(path.read_text())
    config["zero_optimization"] |= zero
    return check_config(config, ranks)


def record(name="a", stage=2, losses=LOSSES, skipped=(), seconds=0.1, iqr=0.001, backward=1500,
           step=1550, reductions=3, swept=None, error=None, resumed=None, top=None, scale=65536.0,
           **zero):
    """One run as the script records it; peaks in MB, skipped are numbers of steps."""
    config = unflatten(resolved(STAGE0, stage=stage, **zero)) | (top or {})
    steps = [{"step": i + 1, "loss": loss, "seconds": seconds, "applied": i + 1 not in skipped,
              "loss_scale": scale, "warmup": i < 3, "epoch": 0} for i, loss in enumerate(losses)]
    peaks = {"init": 500 * MB, "forward": 1200 * MB, "backward": backward * MB, "step": step * MB,
             "steady": max(backward, step) * MB, "overall": max(backward, step) * MB}
    expected = {"resident": 1000 * MB, "gradients": 100 * MB, "buckets": 0,
                "backward": (backward - 70) * MB, "step": (step - 70) * MB}
    return {
        "name": name, "config": config, "swept": swept or {}, "steps": steps, "error": error,
        "resumed_from_step": resumed, "skipped_steps": len(skipped), "repairs": [],
        "median_step_seconds": seconds if len(losses) > len(skipped) + 3 else None,
        "step_seconds_iqr": iqr, "tokens_per_second": 1e3, "padding_share": 0.2,
        "floor_bytes": 68 * MB, "peak_allocated_bytes": peaks, "worst_rank": 1,
        "peak_allocated_bytes_per_rank": [peaks, peaks], "peak_reserved_bytes": 2e9,
        "device_used_bytes": 3e9, "expected_bytes": expected,
        "expected_bytes_per_rank": [expected, expected],
        "collectives": {"all_reduce": {"count": reductions, "bytes": 250_000_000},
                        "control": {"count": 2, "bytes": 5}}}


def environment(ranks=2, kind="cuda_allocator", **more):
    return {"world_size": ranks, "memory_kind": kind, "share_gpu": False, "data": None,
            "model": "gpt2", "parameters": 124_439_808, "precision": "fp16", "seq_len": 64} | more


def swept(key, value, **more):
    """A run of a sweep over one key of zero_optimization."""
    name = key.rpartition(".")[2]
    more.setdefault("losses", LONG)
    return record(f"a {name}={value:g}", swept={key: value}, **{name: value}, **more)


def failed(name="broken"):
    return {"name": name, "config": record()["config"], "swept": {}, "steps": [],
            "error": "rank 1, backward: out of memory"}


LONG = [10 - i / 2 for i in range(10)]
LR, BETAS = "optimizer.params.lr", "optimizer.params.betas"
OTHER_LR = {"optimizer": {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True}}}
SMALL = dict(reductions=75, backward=1430, seconds=0.2)
CASES = {
    # verdict, outcome, words of the detail, runs, environment
    "falls": ("loss_falls", "PASS", ["10.0", "7.0"], [record()], {}),
    "rises": ("loss_falls", "FAIL", ["a:"], [record(losses=(7, 8, 9, 10))], {}),
    "fourth counts, not the last": ("loss_falls", "FAIL", [], [record(losses=(8, 9, 9, 9, 1))], {}),
    "two steps": ("loss_falls", "PASS", [], [record(losses=(8, 7))], {}),
    "one step": ("loss_falls", "NOT APPLICABLE", [], [record(losses=(8,))], {}),
    "not finite": ("loss_falls", "FAIL", ["finite"], [record(losses=(8, None, 6, 5))], {}),
    "second run rises": ("loss_falls", "FAIL", ["b:"],
                         [record(), record("b", losses=(7, 8, 9, 10))], {}),
    "all skipped": ("loss_falls", "FAIL", ["skipped", "1e+09"],
                    [record(skipped=(1, 2, 3, 4, 5), scale=1e9)], {}),
    "skipped first": ("loss_falls", "PASS", ["9.0"], [record(skipped=(1,))], {}),
    "own text by tenths": ("loss_falls", "PASS", [],
                           [record(losses=[5, 6, 7, 8] + [4] * 26)], {"data": "x.txt"}),
    "own text rises": ("loss_falls", "FAIL", [],
                       [record(losses=[5, 4, 3, 2] + [6] * 26)], {"data": "x.txt"}),
    "nothing finished": ("loss_falls", "FAIL", [], [failed()], {}),

    "same losses": ("loss_agrees", "PASS", ["tolerance"], [record(stage=0), record("b")], {}),
    "within tolerance": ("loss_agrees", "PASS", [],
                         [record(), record("b", losses=[x * 1.0009 for x in LOSSES])], {}),
    "outside tolerance": ("loss_agrees", "FAIL", ["b:"],
                          [record(), record("b", losses=[x * 1.0011 for x in LOSSES])], {}),
    "one step outside": ("loss_agrees", "FAIL", [],
                         [record(), record("b", losses=(10.0, 9.0, 8.0, 7.0, 6.1))], {}),
    "third run outside": ("loss_agrees", "FAIL", ["c:"],
                          [record(), record("b"), record("c", losses=(9, 8, 7, 6, 5))], {}),
    "the worst of those within": ("loss_agrees", "PASS", ["c: within 9e-04", "1 more likewise"], [
        record(), record("b"), record("c", losses=(10, 9, 8, 7.0063, 6))], {}),
    "one run": ("loss_agrees", "NOT APPLICABLE", [], [record()], {}),
    "both skipped": ("loss_agrees", "PASS", [],
                     [record(skipped=(1,)), record("b", skipped=(1,))], {}),
    "one skipped": ("loss_agrees", "NOT APPLICABLE", ["step 3"],
                    [record(), record("b", skipped=(3,), losses=(10, 9, 8, 9, 9))], {}),
    "apart before one skipped": ("loss_agrees", "FAIL", [],
                                 [record(), record("b", skipped=(3,), losses=(10, 9.5, 8, 9, 9))],
                                 {}),
    "another rate": ("loss_agrees", "NOT APPLICABLE", ["gradient_clipping"],
                     [record(), record("b", top={"gradient_clipping": 2.0}, losses=(1, 1, 1, 1))],
                     {}),

    "saved": ("memory_saved", "PASS", ["2582", "1568", "39.3%"],
              [record(stage=0, step=2582), record("b", step=1568)], {}),
    "attributed": ("memory_saved", "PASS", ["1007", "7 MB", "adds nothing"],
                   [record(stage=0, step=2582), record("b", stage=1, step=1575),
                    record("c", step=1568)], {}),
    "gradients save too": ("memory_saved", "PASS", ["300 MB"],
                           [record(stage=0, step=2582), record("b", stage=1, step=1868),
                            record("c", step=1568)], {}),
    "more, not less": ("memory_saved", "FAIL", ["3315"],
                       [record(stage=0, step=2582), record("b", backward=3315)], {}),
    "the same": ("memory_saved", "NOT APPLICABLE", ["noise"],
                 [record(stage=0, step=2582), record("b", step=2580)], {}),
    "one rank": ("memory_saved", "NOT APPLICABLE", ["one rank"],
                 [record(stage=0, step=2582), record("b", step=2807)], {"world_size": 1}),
    "on a CPU": ("memory_saved", "NOT APPLICABLE", ["resident set"],
                 [record(stage=0, step=2582), record("b")], {"memory_kind": "resident_set"}),
    "no stage 0": ("memory_saved", "NOT APPLICABLE", ["stage 0"], [record()], {}),

    "bucket": ("bucket_effect", "PASS", ["75 and 3", "1430", "1627", "PASS", "200", "100"],
               [swept(BUCKET, 1e6, **SMALL), swept(BUCKET, 1e7, reductions=11),
                swept(BUCKET, 5e7, backward=1627)], {}),
    "small bucket needs more": ("bucket_effect", "FAIL", ["FAIL"],
                                [swept(BUCKET, 1e6, reductions=75, backward=1700, seconds=0.2),
                                 swept(BUCKET, 5e7, backward=1627)], {}),
    "small bucket is faster": ("bucket_effect", "FAIL", ["FAIL"],
                               [swept(BUCKET, 1e6, reductions=75, backward=1430, seconds=0.05),
                                swept(BUCKET, 5e7, backward=1627)], {}),
    "small bucket reduces less": ("bucket_effect", "FAIL", [],
                                  [swept(BUCKET, 1e6, reductions=1, backward=1430, seconds=0.2),
                                   swept(BUCKET, 5e7, backward=1627)], {}),
    "bucket within the noise": ("bucket_effect", "NOT APPLICABLE", ["noise"],
                                [swept(BUCKET, 1e8), swept(BUCKET, 5e8)], {}),
    "noisy time is no failure": ("bucket_effect", "PASS", ["noise"],
                                 [swept(BUCKET, 1e6, reductions=75, backward=1430, seconds=0.08,
                                        iqr=0.05), swept(BUCKET, 5e7, backward=1627)], {}),
    "overall peak unmoved": ("bucket_effect", "PASS", ["unmoved", "step"],
                             [swept(BUCKET, 1e6, step=1568, **SMALL),
                              swept(BUCKET, 5e7, step=1568, backward=1526)], {}),
    "bucket on a CPU": ("bucket_effect", "PASS", ["75 and 3", "resident set"],
                        [swept(BUCKET, 1e6, reductions=75, backward=2000, seconds=0.2),
                         swept(BUCKET, 5e7)], {"memory_kind": "resident_set"}),
    "bucket on a shared GPU": ("bucket_effect", "PASS", ["share"],
                               [swept(BUCKET, 1e6, reductions=75, backward=1430, seconds=0.05),
                                swept(BUCKET, 5e7, backward=1627)], {"share_gpu": True}),
    "few steps tell no time": ("bucket_effect", "PASS", ["too few steps"],
                               [swept(BUCKET, 1e6, **SMALL | {"seconds": 0.05}, losses=LOSSES),
                                swept(BUCKET, 5e7, backward=1627, losses=LOSSES)], {}),
    "no bucket swept": ("bucket_effect", "NOT APPLICABLE", [], [record(), record("b")], {}),
    "bucket and overlap": ("bucket_effect", "NOT APPLICABLE", [],
                           [record(reduce_bucket_size=1e6, overlap_comm=True),
                            record("b", reduce_bucket_size=5e7, overlap_comm=False)], {}),

    "allgather": ("knob_without_effect", "PASS", ["allgather_bucket_size",
                                                  "all_gather_into_tensor"],
                  [swept(ALLGATHER, 1e6), swept(ALLGATHER, 5e7)], {}),
    "effect on collectives": ("knob_without_effect", "NOT APPLICABLE", ["allgather_bucket_size"],
                              [swept(ALLGATHER, 1e6, reductions=9), swept(ALLGATHER, 5e7)], {}),
    "effect on memory": ("knob_without_effect", "NOT APPLICABLE", [],
                         [swept(ALLGATHER, 1e6, backward=1400), swept(ALLGATHER, 5e7)], {}),
    "effect on time": ("knob_without_effect", "NOT APPLICABLE", [],
                       [swept(ALLGATHER, 1e6, seconds=0.2), swept(ALLGATHER, 5e7)], {}),
    "memory on a CPU proves nothing": ("knob_without_effect", "PASS", ["allgather_bucket_size"],
                                       [swept(ALLGATHER, 1e6, backward=1400),
                                        swept(ALLGATHER, 5e7)], {"memory_kind": "resident_set"}),
    "big buckets": ("knob_without_effect", "PASS", ["reduce_bucket_size", "gradients"],
                    [swept(BUCKET, 1e9), swept(BUCKET, 5e9)], {}),
    "a key outside of ZeRO without effect": (
        "knob_without_effect", "PASS", ["steps_per_print", "changed nothing"],
        [record(f"a {n}", losses=LONG, swept={"steps_per_print": n}, top={"steps_per_print": n})
         for n in (1, 10)], {}),
    "other betas": (
        "knob_without_effect", "NOT APPLICABLE", ["betas", "moved losses"],
        [record(f"a {b}", losses=[x + b / 1e4 for x in LONG], swept={BETAS: [0.9, b]}, top={
            "optimizer": {"type": "AdamW", "params": {"betas": [0.9, b], "torch_adam": True}}})
         for b in (0.9, 0.99)], {}),
    "a sweep that was stopped": (
        "knob_without_effect", "PASS", ["allgather_bucket_size"],
        [swept(ALLGATHER, 1e6), swept(ALLGATHER, 5e7, losses=LONG[:9])], {}),
    "what a shared GPU does not tell": (
        "knob_without_effect", "PASS", ["not compared: time ranks share a GPU"],
        [swept(ALLGATHER, 1e6, seconds=0.5), swept(ALLGATHER, 5e7)], {"share_gpu": True}),
    "collectives that were not counted": (
        "knob_without_effect", "NOT APPLICABLE", ["collectives not counted"],
        [swept(BUCKET, size) | {"collectives": None} for size in (1e6, 5e7)], {}),
    "each stage 2 is judged, and named": (
        "memory_saved", "FAIL", ["a reduce_bucket_size=5e+08: stage 0 2584", "+28.3%",
                                 "a reduce_bucket_size=1e+06: stage 0 2584", "-39.3%"],
        [record(stage=0, step=2584), swept(BUCKET, 5e8, backward=3315, step=1568),
         swept(BUCKET, 1e6, step=1568)], {}),
    "offload none is no offload": (
        "memory_saved", "PASS", ["-39.3%"],
        [record(stage=0, step=2584), record("b", step=1568, offload_optimizer={"device": "none"})],
        {}),
    "an effect in one of two sweeps": (
        "knob_without_effect", "NOT APPLICABLE", ["overlap_comm", "moved memory"],
        [record(f"a {bucket} {overlap}", swept={BUCKET: bucket, OVERLAP: overlap}, losses=LONG,
                reduce_bucket_size=bucket, overlap_comm=overlap, reductions=50_000_000 // bucket,
                backward=1600 if overlap and bucket > 1e6 else 1500)
         for bucket in (10 ** 6, 50_000_000) for overlap in (False, True)], {}),
    "a compiled graph that trains otherwise": (
        "loss_agrees", "FAIL", ["2e-02"],
        [record(stage=0), record("b", losses=(10, 9.2, 8, 7, 6), top={
            "compile": {"deepcompile": True}})], {}),
    "collectives of a compiled graph": (
        "bucket_effect", "PASS", ["reductions NOT APPLICABLE (not counted)",
                                  "backward peak 1430 and 1500 MB PASS"],
        [swept(BUCKET, 1e6, **SMALL) | {"collectives": None},
         swept(BUCKET, 5e7) | {"collectives": None}], {}),
    "another learning rate is no knob without effect": (
        "knob_without_effect", "NOT APPLICABLE", ["losses"],
        [record("a", losses=LONG, swept={LR: 2.0}, top={"optimizer": OTHER_LR["optimizer"] | {
            "params": {"lr": 2.0, "torch_adam": True}}}),
         record("b", losses=[x / 2 for x in LONG], swept={LR: 1.0}, top=OTHER_LR)], {}),
    "memory of runs that train otherwise": (
        "memory_saved", "NOT APPLICABLE", ["alike"],
        [record(stage=0, step=2582), record("b", top=OTHER_LR)], {}),
    "memory with offload": (
        "memory_saved", "NOT APPLICABLE", ["offload"],
        [record(stage=0, step=2582), record("b", offload_optimizer={"device": "cpu"})], {}),
    "one loss before any update": (
        "loss_agrees", "NOT APPLICABLE", ["applied"],
        [record(losses=(8,)), record("b", losses=(8,))], {}),
    "all skipped agree on nothing": (
        "loss_agrees", "NOT APPLICABLE", ["applied"],
        [record(skipped=(1, 2, 3, 4, 5)), record("b", skipped=(1, 2, 3, 4, 5))], {}),
    "rounding grows": (
        "loss_agrees", "PASS", ["over 6 steps", "then 8e-03"],
        [record(losses=(10, 9, 8, 7, 6, 5, 0.4)), record("b", losses=(10, 9, 8, 7, 6, 5, 0.48))],
        {}),
    "parts later": (
        "loss_agrees", "FAIL", ["over 6 steps", "then 1e-02"],
        [record(losses=(10, 9, 8, 7, 6, 5, 4)), record("b", losses=(10, 9, 8, 7, 6, 5, 4.12))], {}),
    "parts early": (
        "loss_agrees", "FAIL", ["within 2e-03"],
        [record(losses=(10, 9, 8, 7)), record("b", losses=(10, 9, 8.016, 7))], {}),
    "one alone skips late": (
        "loss_agrees", "NOT APPLICABLE", ["skipped step 8"],
        [record(losses=(10, 9, 8, 7, 6, 5, 4, 3)),
         record("b", losses=(10, 9, 8, 7, 6, 5, 4, 3), skipped=(8,))], {}),
    "only one is not finite": (
        "loss_agrees", "FAIL", ["finite", "step 3"],
        [record(), record("b", losses=(10.0, 9.0, None, None, None))], {}),
    "own text, few steps": ("loss_falls", "NOT APPLICABLE", ["too few"],
                            [record(losses=(8, 9))], {"data": "x.txt"}),
    "nothing swept": ("knob_without_effect", "NOT APPLICABLE", [], [record()], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict(case):
    name, outcome, words, runs, changes = CASES[case]
    verdicts = compare(runs, environment(**changes))
    assert [v["name"] for v in verdicts] == ["loss_falls", "loss_agrees", "memory_saved",
                                             "bucket_effect", "knob_without_effect"]
    verdict = next(v for v in verdicts if v["name"] == name)
    assert verdict["outcome"] == outcome, verdict
    detail = verdict["detail"].replace(",", "")                # 2,582 MB or 2582 MB
    assert detail and all(word in detail for word in words), verdict
    json.dumps(verdicts, allow_nan=False)


@pytest.mark.parametrize("bucket, split", [(1e6, True), (5e8, False)])
def test_the_saving_is_split_by_a_stage_1_that_differs_in_the_stage_alone(bucket, split):
    runs = [record(stage=0, step=2584), swept(BUCKET, bucket, stage=1, step=1575),
            swept(BUCKET, 1e6, step=1568)]
    verdict = next(v for v in compare(runs, environment()) if v["name"] == "memory_saved")
    assert verdict["outcome"] == "PASS" and ("gradients" in verdict["detail"]) is split


@pytest.mark.parametrize("parameters, said", [(124_439_808, False), (3_382_080, True)])
def test_one_bucket_is_said_to_hold_all_gradients_where_it_does(parameters, said):
    runs = [swept(BUCKET, 5e7), swept(BUCKET, 5.05e7)]
    verdict = compare(runs, environment(parameters=parameters))[-1]
    assert verdict["outcome"] == "PASS" and ("one bucket" in verdict["detail"]) is said


@pytest.mark.parametrize("order", [0, 1])
def test_a_failed_run_is_left_out_of_every_verdict(order):
    runs = [record(stage=0, step=2582), record("b", step=1568)]
    runs.insert(order, failed())
    assert {v["name"]: v["outcome"] for v in compare(runs, environment())}["memory_saved"] == "PASS"
    assert recommend(runs, environment()) is None            # nothing was swept


def test_no_runs_at_all():
    outcomes = {v["name"]: v["outcome"] for v in compare([], environment())}
    assert "PASS" not in outcomes.values() and recommend([], environment()) is None


def test_groups_differ_in_one_key_alone():
    runs = [swept(BUCKET, value, overlap_comm=overlap) for overlap in (True, False)
            for value in (5e7, 1e6)] + [record(stage=0)]
    groups = groups_by(runs, BUCKET)
    assert [[value for value, _ in group] for group in groups] == [[1e6, 5e7], [1e6, 5e7]]
    for group in groups:
        assert len({run["config"]["zero_optimization"]["overlap_comm"] for _, run in group}) == 1


def test_recommendation_is_the_lowest_peak_among_the_fast():
    runs = [swept(BUCKET, 1e6, step=1568, seconds=0.062, backward=1430),
            swept(BUCKET, 5e7, step=1568, seconds=0.0405, backward=1627),
            swept(BUCKET, 5e8, step=1568, seconds=0.040, backward=3315)]
    advice = recommend(runs, environment())
    assert advice["run"] == "a reduce_bucket_size=5e+07" and advice["peak_bytes"] == 1627 * MB
    assert advice["median_step_seconds"] == 0.0405
    assert "59 MB" in advice["cost_of_less"] and "+53%" in advice["cost_of_less"]
    shared = recommend(runs, environment(share_gpu=True))    # times say nothing there
    assert shared["run"] == "a reduce_bucket_size=1e+06" and shared["cost_of_less"] is None
    assert recommend(runs, environment(kind="resident_set")) is None
    assert recommend(runs[:1], environment()) is None
    short = [swept(BUCKET, size, step=1568, seconds=seconds, losses=LOSSES) for size, seconds in (
        (1e6, 0.06), (5e7, 0.05))]                           # two steady steps tell no time
    assert not recommend(short, environment())["by_time"]


def test_no_recommendation_among_runs_that_train_otherwise():
    runs = [swept(BUCKET, 1e6), swept(BUCKET, 5e7, top=OTHER_LR)]
    assert recommend(runs, environment()) is None


def test_recommendation_says_that_nothing_needs_less():
    runs = [swept(BUCKET, size, step=1568, seconds=0.04) for size in (1e7, 5e7)]
    advice = recommend(runs, environment())
    assert advice["cost_of_less"] is None and advice["peak_bytes"] == 1568 * MB


# -------------------------------------------------------------------------------- memory model

WORKSPACE = 68 * MB                     # any CUDA run of this model has it (facts, one H200)
WIDTHS = {"gpt2": (768, 12), "gpt2-medium": (1024, 24), "gpt2-large": (1280, 36)}


def sizes(model="gpt2"):
    """Elements of each GPT-2 parameter in the model's order, from the architecture."""
    d, layers = WIDTHS[model]
    norm, attention = [d, d], [3 * d * d, 3 * d, d * d, d]
    mlp = [4 * d * d, 4 * d, 4 * d * d, d]
    return [50257 * d, 1024 * d] + layers * (norm + attention + norm + mlp) + norm


def expect(phase, ranks, rank=None, model="gpt2", **zero):
    """Expected bytes of one rank, or of the worst, with the workspace."""
    config = resolved(ZERO2, ranks, **zero)
    every = [expected_bytes(sizes(model), config, ranks, r)[phase] for r in range(ranks)]
    return WORKSPACE + (max(every) if rank is None else every[rank])


def test_parameters_are_gpt2s():
    assert sum(sizes()) == 124_439_808 and sum(sizes("gpt2-medium")) == 354_823_168


OVERLAP = dict(overlap_comm=True)
PLAIN = dict(overlap_comm=False)
MEASURED = [
    # MB on one H200, phase, ranks, rank (None: the worst), keys of zero_optimization
    (2582, "step", 1, None, dict(stage=0)), (2582, "step", 2, None, dict(stage=0)),
    (2333, "backward", 2, None, dict(stage=0)), (2807, "step", 1, None, dict(stage=2)),
    (1575, "step", 2, None, dict(stage=1) | PLAIN),
    *[(1568, "step", 2, None, dict(stage=2, reduce_bucket_size=bucket) | overlap)
      for bucket in (5e8, 5e7, 1e7, 1e6) for overlap in (PLAIN, OVERLAP)],
    *[(mb, "backward", 2, None, dict(reduce_bucket_size=bucket) | PLAIN)
      for bucket, mb in ((5e8, 2315), (5e7, 1526), (1e7, 1447), (1e6, 1428))],
    *[(mb, "backward", 2, None, dict(reduce_bucket_size=bucket) | OVERLAP)
      for bucket, mb in ((5e8, 3315), (5e7, 1627), (1e7, 1468), (1e6, 1430))],
    *[(mb, "backward", 2, 0, dict(reduce_bucket_size=bucket) | PLAIN)
      for bucket, mb in ((5e7, 1398), (1e7, 1445), (1e6, 1426))],
    (1125, "backward", 4, 0, dict(reduce_bucket_size=5e7) | OVERLAP),
    (928, "backward", 4, 0, dict(reduce_bucket_size=1e6) | OVERLAP),
    (1019, "step", 4, 0, dict(reduce_bucket_size=5e7) | OVERLAP)]


@pytest.mark.parametrize("mb, phase, ranks, rank, zero", MEASURED)
def test_expected_within_three_percent_of_measured(mb, phase, ranks, rank, zero):
    expected = expect(phase, ranks, rank, **zero) / MB
    assert abs(expected - mb) <= 0.03 * mb, f"expected {expected:.0f}, measured {mb}"


EVERY_RANK = [
    # model, stage, ranks, MB on each rank (stage 0: on all): resident, backward, step. One H200
    # shared over NCCL 2.31, 5e7 with overlap; gpt2-large on 8 ranks in expandable segments
    ("gpt2", 0, 4, [1819], [2334], [2584]),
    ("gpt2", 2, 4, [692, 691, 691, 691], [1125, 1125, 1191, 1191], [1018, 1004, 944, 944]),
    ("gpt2", 0, 8, [1819], [2334], [2584]),
    ("gpt2", 2, 8, [505, 505, 505, 505, 505, 505, 505, 505],
     [939, 939, 939, 939, 977, 972, 977, 972], [707, 707, 695, 630, 636, 631, 636, 631]),
    ("gpt2-medium", 2, 2, [2907, 2907], [3773, 3777], [4328, 4332]),
    ("gpt2-medium", 0, 2, [5036], [6459], [7169]),
    ("gpt2-large", 2, 2, [6260, 6260], [7621, 7667], [9357, 9361]),
    ("gpt2-large", 0, 2, [11131], [13698], [15862]),
    ("gpt2-large", 2, 4, [3938, 3938, 3938, 3938], [4919, 4919, 4919, 4974],
     [5495, 5495, 5495, 5495]),
    ("gpt2-large", 0, 4, [11131], [13698], [15862]),
    ("gpt2-large", 2, 8, [2777, 2777, 2777, 2777, 2777, 2777, 2777, 2777],
     [3560, 3573, 3573, 3560, 3560, 3582, 3620, 3648],
     [3555, 3568, 3568, 3555, 3555, 3564, 3564, 3555]),
    ("gpt2-large", 0, 8, [10905], [13460], [15549])]


@pytest.mark.parametrize("model, stage, ranks, resident, backward, step", EVERY_RANK)
def test_expected_on_every_rank(model, stage, ranks, resident, backward, step):
    for phase, measured in (("resident", resident), ("backward", backward), ("step", step)):
        for rank, mb in enumerate(measured):
            expected = expect(phase, ranks, rank, model, stage=stage, **OVERLAP) / MB
            assert abs(expected - mb) <= 0.03 * mb, f"{phase}, rank {rank}: {expected:.0f}, {mb}"


def test_ranks_that_do_not_fit_on_a_gpu_fail_before_anything_is_built():
    import torch                                           # as check_fits does
    run = Run("a", resolved(ZERO2, 4), {})
    launch = Launch(0, 4, 0, torch.device("cuda", 0), "nccl", shared=4)
    model = mock.Mock()
    model.parameters.return_value = [mock.Mock(numel=lambda n=n: n) for n in sizes()]
    with mock.patch("torch.cuda.get_device_properties") as properties:
        properties.return_value.total_memory = 4.8e9       # 4 x 1188 MB are 4.75 GB
        check_fits({"floor_bytes": WORKSPACE}, run, launch, model)
        properties.return_value.total_memory = 4.7e9
        with pytest.raises(RunFailed, match=r"4 rank\(s\) on one GPU need 1\.2 GB each.* 4\.7 GB"):
            check_fits({"floor_bytes": WORKSPACE}, run, launch, model)


@pytest.mark.parametrize("bucket", [5e7, 1e6])
def test_expected_of_gpt2_medium(bucket):
    peak = max(expect(phase, 2, model="gpt2-medium", reduce_bucket_size=bucket)
               for phase in ("backward", "step")) / MB
    assert abs(peak - 4332) <= 0.03 * 4332


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_resident_is_weights_and_a_share_of_the_states(stage, ranks):
    psi, share = sum(sizes()), ranks if stage else 1
    formula = 2 * psi + 12 * psi / share
    assert abs(expect("resident", ranks, stage=stage) - WORKSPACE - formula) <= 0.005 * formula


def test_less_memory_by_stage_ranks_and_bucket():
    steps = [expect("step", 2, stage=stage) for stage in (0, 1, 2)]
    assert steps[0] > steps[1] >= steps[2]
    residents = [expect("resident", ranks) for ranks in (1, 2, 4, 8)]
    assert residents == sorted(residents, reverse=True) and len(set(residents)) == 4
    backward = [expect("backward", 2, reduce_bucket_size=b) for b in (1e6, 1e7, 5e7, 1e8, 5e8)]
    assert backward == sorted(backward) and len(set(backward)) == 5
    assert len({expect("backward", 2, stage=0, reduce_bucket_size=b) for b in (1e6, 5e8)}) == 1


def test_buffers_are_the_bucket_twice_with_overlap():
    for overlap, times in ((False, 1), (True, 2)):
        config = resolved(ZERO2, reduce_bucket_size=1e7, overlap_comm=overlap)
        assert expected_bytes(sizes(), config, 2, 0)["buckets"] == 1e7 * 2 * times


def test_the_plot_names_the_buckets(tmp_path):
    runs = [swept(BUCKET, size) for size in (1e6, 1e7, 5e7)]
    with mock.patch("matplotlib.figure.Figure.savefig", autospec=True) as savefig:
        plot(tmp_path / "p.png", runs, environment())
    figure = savefig.call_args.args[0]
    figure.draw_without_rendering()
    bars, _, buckets, _ = ([label.get_text() for label in axis.get_xticklabels()]
                           for axis in figure.axes)
    assert bars == ["forward", "backward", "step"] and buckets == ["1e6", "1e7", "5e7"]
