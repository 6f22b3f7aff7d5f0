#!/usr/bin/env python3
"""Is train_zero2's instrumented loop at most 2 % slower than a bare DeepSpeed loop?

One engine from train_zero2's build_engine (ds_config_zero2.json) trains in alternating blocks of
  bare          forward, backward, step between two clock readings on an idle device; no more;
  instrumented  train_step with peak memory by phase and counted collectives, and after the clock
                has stopped the loss read and gathered from all ranks, as train_zero2 does it.

    python benchmarks/overhead.py
    torchrun --nproc-per-node=2 benchmarks/overhead.py --share-gpu --pairs 10
    python benchmarks/overhead.py --pool a.json b.json     # the pairs of earlier --json files

Every pair of blocks, neighbours in time, gives one ratio instrumented / bare of the blocks' median
step; which goes first alternates. Printed: the median ratio over the pairs and its interval by
order statistics (distribution-free, at least 95 % from 6 pairs on), once for the timed region and
once for the wall time of a step with all that stands outside it. The last line of stdout is one
JSON document. Exit status 1 where the timed region's whole interval is above 2 %. The batch is the
same for every step and on the device beforehand: loading data is in neither loop.
"""
import json
import math
import statistics
import sys
import time
import types
from pathlib import Path

from common import (T, describe, headline, new_parser, random_batch, random_model, resolve, start,
                    synchronize)

LIMIT = 1.02
WARM_UP_STEPS = 5                      # of each kind
MEASURES = ("timed", "wall")


def bare_block(engine, batch, steps, launch, memory, repairs):
    """[(timed seconds, wall seconds)] of steps with nothing around them. Stages 1 and 2 only."""
    times = []
    for _ in range(steps):
        top = time.perf_counter()
        synchronize(launch)
        begin = time.perf_counter()
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        synchronize(launch)
        end = time.perf_counter()
        times.append((end - begin, time.perf_counter() - top))
    return times


def instrumented_block(engine, batch, steps, launch, memory, repairs):
    """The same of train_zero2's step: what its measure() does, in its order, but the printing."""
    times, record, counter = [], [], T.CollectiveCounter()
    for step in range(steps):
        top = time.perf_counter()
        scale = getattr(engine.optimizer, "loss_scale", None)
        everyone = T.timed_step(engine, [batch], launch, memory, repairs)
        record.append({
            "step": step, "loss": everyone[:, 0].mean().item(), "loss_scale": scale,
            "seconds": everyone[:, 1].max().item(), "stop": everyone[:, 2].max().item(),
            "applied": bool(engine.was_step_applied()), "peaks": memory.take(),
            "collectives": counter.take(), "resident": memory.read()})
        times.append((everyone[launch.rank, 1].item(), time.perf_counter() - top))
    counter.close()
    return times


def median_interval(values):
    """(median, low, high, coverage): a sign-test interval of the median; pure.

    Low and high are the k-th smallest and largest value, k as large as 95 % coverage permits, but
    at least 1; coverage is what that gives.
    """
    n, ordered, k = len(values), sorted(values), 1

    def outside(k):                                        # 2 P(Binomial(n, 1/2) < k)
        return 2 * sum(math.comb(n, i) for i in range(k)) / 2 ** n
    while outside(k + 1) <= 0.05:
        k += 1
    return statistics.median(values), ordered[k - 1], ordered[n - k], max(0.0, 1 - outside(k))


def judge(pairs, say=print):
    """Say the verdict on pairs of blocks and return it: {measure: {"ratio", "low", ...}}."""
    found = {}
    for measure in MEASURES:
        ratios = [pair["instrumented"][measure] / pair["bare"][measure] for pair in pairs]
        median, low, high, coverage = median_interval(ratios)
        bare, instrumented = (statistics.median(pair[name][measure] for pair in pairs)
                              for name in ("bare", "instrumented"))
        verdict = "within" if high <= LIMIT else "above" if low > LIMIT else "undecided"
        found[measure] = {"ratio": median, "low": low, "high": high, "coverage": coverage,
                          "verdict": verdict, "bare_seconds": bare,
                          "instrumented_seconds": instrumented}
        say(f"{measure:<6} bare {bare * 1e3:.3f} ms, instrumented {instrumented * 1e3:.3f} ms; "
            f"ratio {median:.4f}, {coverage:.1%} interval {low:.4f} to {high:.4f}; limit "
            f"{LIMIT:.2f}: {verdict}")
    return found


def main():
    parser = new_parser(__doc__)
    parser.add_argument("--pool", nargs="+", type=Path, metavar="FILE",
                        help="run nothing: judge the pairs of earlier --json files together")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks (20)")
    parser.add_argument("--steps-per-block", type=int, default=20, metavar="N", help="(20)")
    args = parser.parse_args()
    if args.pool:
        pairs = [pair for path in args.pool for pair in json.loads(path.read_text())["raw"]]
        print(f"{len(pairs)} pairs of blocks from {len(args.pool)} launches")
        return int(judge(pairs)["timed"]["verdict"] == "above")
    launch = start(args)
    import torch
    model = random_model(args)
    batch, memory = random_batch(args, launch, model), T.PeakMemory(launch)
    run = T.Run("overhead", resolve(args, launch), {})
    flags = types.SimpleNamespace(compile=False, seed=args.seed)
    engine, repairs = T.build_engine(run, launch, model, flags, memory)
    blocks = {"bare": bare_block, "instrumented": instrumented_block}
    environment = describe(args, launch, model)
    if launch.rank == 0:
        print(f"{headline(environment)}\n{args.pairs} pairs of blocks of {args.steps_per_block} "
              f"steps, after {WARM_UP_STEPS} of each kind", flush=True)
    for block in blocks.values():
        block(engine, batch, WARM_UP_STEPS, launch, memory, repairs)
    pairs = []
    for number in range(args.pairs):
        pair = {}
        for name in sorted(blocks, reverse=bool(number % 2)):
            times = blocks[name](engine, batch, args.steps_per_block, launch, memory, repairs)
            slowest = [tuple(map(max, zip(*step))) for step in zip(*launch.gather(times))]
            pair[name] = dict(zip(MEASURES, map(statistics.median, zip(*slowest))))
        pairs.append(pair)
    engine.destroy()
    record = {"benchmark": "overhead", "environment": environment, "limit": LIMIT,
              "pairs": args.pairs, "steps_per_block": args.steps_per_block}
    record |= judge(pairs, print if launch.rank == 0 else str)
    if launch.rank == 0:
        if args.json:
            args.json.write_text(json.dumps(record | {"raw": pairs}, indent=1))
        print(json.dumps(record), flush=True)
    torch.distributed.destroy_process_group()
    return int(record["timed"]["verdict"] == "above")


if __name__ == "__main__":
    sys.exit(main())
