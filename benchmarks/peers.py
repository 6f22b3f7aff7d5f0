#!/usr/bin/env python3
"""How fast and how small is DeepSpeed ZeRO, beside what PyTorch itself offers?

One launch trains the same GPT-2 on the same tokens with every contender in turn: a plain loop
(one rank), DDP, DDP with ZeroRedundancyOptimizer (ZRO), FSDP2 (fully_shard, no reshard after
forward), and DeepSpeed stages 0, 1 and 2 by train_zero2's own build_engine and train_step; with
--packed also on a model whose blocks have one flat weight each (pack in loops.py).

    python benchmarks/peers.py                                                # one rank
    torchrun --nproc-per-node=2 benchmarks/peers.py --micro-batch 8 --seq-len 1024 --rounds 2
    torchrun --nproc-per-node=2 benchmarks/peers.py --share-gpu --steps 5 --warm-up 3

Two tables: all clip to a gradient norm of 1; nobody clips (DeepSpeed 1 and 2: compute_grad_norm
false). A row: peak allocated by phase (MB = 1e6 bytes, each the worst rank's, beyond what stood
before the contender: cuBLAS's workspace and what earlier ones did not give back), median step and
interquartile range (the slowest rank's time, applied steps after the warm-up), tokens/s, share of
the matrix peak measured here, ratios to the best, largest relative difference of the loss to that
of the plain loop or DDP over the first six steps (or up to the first step that only one of the two
skipped: @step; ! over the tolerance).
The last line of stdout is one JSON document; --json FILE adds every step.

Same for all: weights from one seed, loss module (--hf-loss: PyTorch's contenders take
transformers' own loss), dropout off, tokens (random, distinct per rank, the same every step),
fused AdamW and its settings from ds_config_zero2.json, initial loss scale, process group.
Not the same, as each is meant to be used: DDP and the plain loop keep fp32 weights under autocast
and reduce fp32 gradients; FSDP2 and DeepSpeed compute and reduce in the precision named.
"""
import datetime
import gc
import json
import re
import statistics
import time

from common import (T, ZERO, describe, headline, new_parser, random_batch, random_model, start,
                    synchronize)
from loops import DeepSpeedLoop, TorchLoop

TOLERANCE = {"fp16": 1e-3, "fp32": 1e-3, "bf16": 1e-2}   # relative; bf16 keeps 8 bits
CLIP = 1.0
AGREE_SECONDS = 120                    # for all ranks to say how a contender ended


def contenders(args, world_size):
    """[(name, class, kind or stage, settings)] in the order they run, --only applied."""
    rows = [("FSDP2 bf16", TorchLoop, "FSDP2", {"precision": "bf16"})] * (args.precision == "fp16")
    kinds = ("FSDP2", "plain") if world_size == 1 else ("FSDP2", "DDP", "DDP + ZRO")
    rows += [(f"{kind} {args.precision}", TorchLoop, kind, {}) for kind in kinds]
    rows.append(("DeepSpeed 0", DeepSpeedLoop, 0, {}))
    rows += [(f"DeepSpeed {stage}" + " overlap" * on, DeepSpeedLoop, stage,
              {ZERO + "overlap_comm": on}) for stage in (1, 2) for on in (False, True)]
    apart = {ZERO + "overlap_comm": False}
    small, middle = (apart | {ZERO + "reduce_bucket_size": size} for size in (10 ** 6, 10 ** 7))
    grouped = {"groups": 3, ZERO + "contiguous_gradients": False}
    check = ("no check", {"bf16.check_grad_overflow": False}) if args.precision == "bf16" else (
        "one check (patched)", {"one_check": True})       # bf16 has a key for it
    rows += [(f"DeepSpeed 2 {name}", DeepSpeedLoop, 2, changes) for name, changes in (
        ("1e6", small), ("1e7", middle), ("1e7 groups", middle | grouped),
        (check[0], apart | check[1]))]
    if args.packed:
        rows += [(name + " packed", which, kind, settings | {"packed": True})
                 for name, which, kind, settings in rows
                 if not re.search("FSDP2|ZRO|patched", name)]
    if args.compile:
        rows += [(name + " compiled", which, kind, settings | {"compiled": True})
                 for name, which, kind, settings in rows if "ZRO" not in name]
    if args.deepcompile:                                  # last: it does not give all memory back
        rows += [("DeepCompile 2" + " packed" * on + " compiled", DeepSpeedLoop, 2, apart | {
            "compiled": True, "compile.deepcompile": True, "packed": on})
                 for on in (False, True)[:1 + args.packed]]
    return [row for row in rows if re.search(args.only, row[0])]


# -------------------------------------------------------------------------------- measuring

def run_one(contender, clip, args, launch, model, batch):
    """Build, measure and tear down one contender; its record, the same on every rank.

    "error" is one line where it failed on any rank. A rank that fails alone ends the launch after
    AGREE_SECONDS, for the others wait for it in a collective.
    """
    import torch
    import torch.distributed as dist
    name, which, kind, settings = contender
    gc.collect()
    if launch.on_gpu:
        torch.cuda.empty_cache()
    memory, loop, row = T.PeakMemory(launch), None, {"error": None}
    floor = memory.read()
    try:
        loop = which(kind, args, launch, model, clip, **settings)
        row |= measure(loop, args, launch, memory, batch)
    except Exception as error:                            # whatever it is, the others go on
        row["error"] = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:160]
    if loop:
        loop.close()
    loop = None
    torch.compiler.reset()
    gc.collect()
    row["floor"] = min(floor, memory.read())              # an earlier one's memory went meanwhile
    dist.monitored_barrier(launch.control, datetime.timedelta(seconds=AGREE_SECONDS))
    rows = launch.gather(row)
    record = {"name": name, "clip": clip, "error": None, "floor_bytes": max(
        row["floor"] for row in rows)}
    for rank, row in enumerate(rows):
        if row["error"]:
            return record | {"error": f"rank {rank}: {row['error']}"}
    seconds = [max(times) for times in zip(*(row["seconds"] for row in rows))]
    applied = rows[0]["applied"]
    record |= {"seconds": seconds, "applied": applied,
               "losses": [statistics.mean(each) for each in zip(*(row["losses"] for row in rows))],
               "steady_seconds": [s for i, s in enumerate(seconds)
                                  if i >= args.warm_up and applied[i]]}
    if not record["steady_seconds"]:
        return record | {"error": "every step after the warm-up was skipped"}
    record["round_medians"] = [statistics.median(record["steady_seconds"])]
    if launch.on_gpu:
        peaks = [{phase: peak - row["floor"] for phase, peak in row["peaks"].items()}
                 for row in rows]
        record |= {"peak_allocated_bytes_per_rank": peaks, "peak_allocated_bytes": {
            phase: max(peak[phase] for peak in peaks) for phase in peaks[0]}}
        record["peak_bytes"] = max(record["peak_allocated_bytes"].values())
    return record


def measure(loop, args, launch, memory, batch):
    """Warm-up and steps on this rank: seconds, loss and whether it was applied, of every step."""
    row = {"seconds": [], "losses": [], "applied": []}
    for step in range(args.warm_up + args.steps):
        if step == args.warm_up:
            memory.take()
        synchronize(launch)
        begin = time.perf_counter()
        loss = loop.step(memory, *batch)
        synchronize(launch)
        row["seconds"].append(time.perf_counter() - begin)
        row["losses"].append(float(loss))
        row["applied"].append(loop.applied())
    return row | {"peaks": memory.take()}


def matrix_peak(launch):
    """FLOP/s of one device in a square matrix product, measured on rank 0: the median of 20.

    On a GPU 8192^3 in fp16; on a CPU 1024^3 in fp32, which only stands in for it.
    """
    import torch

    def product():
        n, dtype = (8192, torch.float16) if launch.on_gpu else (1024, torch.float32)
        a, b = torch.randn(2, n, n, device=launch.device, dtype=dtype)
        times = []
        for _ in range(25):
            synchronize(launch)
            begin = time.perf_counter()
            a @ b
            synchronize(launch)
            times.append(time.perf_counter() - begin)
        return 2 * n ** 3 / statistics.median(times[5:])

    [peak] = launch.decide(launch.rank == 0, product)
    if launch.on_gpu:                  # cuBLAS's workspaces of both threads belong in every floor
        x = torch.ones(64, 64, device=launch.device, dtype=torch.half, requires_grad=True)
        (x @ x).sum().backward()
    return peak


def flops_per_token(model, seq_len):
    """6 N + 6 V d + 12 L d T / 2, forward and backward: N weights without the embeddings, the
    output layer (vocabulary V, width d), causal attention over T positions in L layers."""
    config, body = model.config, model.transformer
    inner = sum(p.numel() for p in model.parameters()) - (
        body.wte.weight.numel() + body.wpe.weight.numel())
    return (6 * inner + 6 * config.vocab_size * config.n_embd
            + 12 * config.n_layer * config.n_embd * seq_len / 2)


# ------------------------------------------------------------------- comparison and output

def compare(rows, environment):
    """Add medians, ratios, share of the peak and loss difference to the rows that finished; and
    return the best DeepSpeed row over the best peer's, eager and compiled: [{...}]. Pure."""
    e, whole, found = environment, [row for row in rows if not row["error"]], []
    first = next((r for r in whole if r["name"].startswith(("plain", "DDP"))), (whole or [None])[0])
    for row in whole:
        row["median_step_seconds"] = statistics.median(row["steady_seconds"])
        low, _, high = statistics.quantiles(row["steady_seconds"] * 2, n=4)   # of one: itself
        row["step_seconds_iqr"] = high - low
        row["tokens_per_second"] = (e["world_size"] * e["micro_batch"] * e["seq_len"]
                                    / row["median_step_seconds"])
        row["share_of_matrix_peak"] = (row["tokens_per_second"] * e["flops_per_token"]
                                       / e["devices"] / e["matrix_flops"])
        pairs = zip(row["applied"], first["applied"])
        row["parted_at_step"] = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), None)
        gaps = [abs(a - b) / abs(b) for a, b in zip(row["losses"], first["losses"])]
        gaps = gaps[:min(row["parted_at_step"] or T.LOSS_STEPS, T.LOSS_STEPS)]
        row["loss_difference"] = max(gaps) if all(gap < 1e9 for gap in gaps) else None
        tolerance = TOLERANCE["bf16" if "bf16" in row["name"] else e["precision"]]
        row["loss_agrees"] = row["loss_difference"] is not None and (
            row["loss_difference"] <= tolerance)
    for key in ("median_step_seconds", "peak_bytes"):
        shown = [row for row in whole if key in row]
        for row in shown:
            row[key + "_ratio"] = row[key] / min(other[key] for other in shown)
        for compiled in (False, True):
            group = [row for row in shown if ("compiled" in row["name"]) == compiled]
            ours = [row for row in group if row["name"].startswith("Deep")
                    and "patched" not in row["name"]]
            peers = [row for row in group if not row["name"].startswith("Deep")]
            if ours and peers:
                a, b = (min(side, key=lambda row: row[key]) for side in (ours, peers))
                found.append({"clip": a["clip"], "compiled": compiled, "measure": key,
                              "deepspeed": a["name"], "peer": b["name"], "ratio": a[key] / b[key]})
    return found


def print_table(title, rows, summary):
    width = max(len(row["name"]) for row in rows) + 1
    print(f"\n{title} (c.: compiled)\n{'':<{width}}{'forward':>7}{'backw.':>7}{'step':>6}"
          f"{'peak':>6}{'x best':>7}{'ms':>8}{'IQR':>6}{'x best':>7}{'tokens/s':>10}"
          f"{'of peak':>8}{'loss':>9}")
    for row in rows:
        name = f"{row['name'].replace(' compiled', ' c.'):<{width}}"
        if row["error"]:
            print(f"{name}failed: {row['error']}")
            continue
        peaks = row.get("peak_allocated_bytes", {})
        cells = [f"{peaks[p] / 1e6:.0f}" if peaks else "-" for p in ("forward", "backward", "step")]
        cells += [f"{row['peak_bytes'] / 1e6:.0f}", f"{row['peak_bytes_ratio']:.2f}"] if peaks \
            else ["-", "-"]
        gap, parted = row["loss_difference"], row["parted_at_step"]
        loss = ("nan" if gap is None else f"{gap:.0e}") + "!" * (not row["loss_agrees"]) + (
            f"@{parted}" if parted else "")
        print(name + "".join(f"{cell:>{wide}}" for cell, wide in zip(cells, (7, 7, 6, 6, 7)))
              + f"{row['median_step_seconds'] * 1e3:>8.1f}{row['step_seconds_iqr'] * 1e3:>6.1f}"
              f"{row['median_step_seconds_ratio']:>7.2f}{row['tokens_per_second']:>10,.0f}"
              f"{row['share_of_matrix_peak']:>8.1%}{loss:>9}")
    for s in summary:
        print(f"{'compiled' if s['compiled'] else 'eager'}, {s['measure']}: {s['deepspeed']} / "
              f"{s['peer']} = {s['ratio']:.3f}")


def run_table(clip, args, launch, model, batch, record, say):
    """Every contender, --rounds times in alternating order; the rows in the order of the list."""
    listed, rows = contenders(args, launch.world_size), {}
    for number in range(args.rounds):
        for contender in listed[::-1 if number % 2 else 1]:
            row = run_one(contender, clip, args, launch, model, batch)
            say(f"  {row['name']}: " + (row["error"] or f"{row['round_medians'][0] * 1e3:.1f} ms"))
            first = rows.setdefault(row["name"], row)
            first["error"] = first["error"] or row["error"]
            if first is row:
                record["contenders"].append(row)
            elif not first["error"]:
                first["steady_seconds"] += row["steady_seconds"]
                first["round_medians"] += row["round_medians"]
            if args.json and launch.rank == 0:
                args.json.write_text(json.dumps(record, indent=1))
    return [rows[name] for name, *_ in listed]


def main():
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=30, help="measured steps per contender and round (30)")
    add("--warm-up", type=int, default=5, help="steps before them (5)")
    add("--rounds", type=int, default=1, help="go through the contenders so often (1)")
    add("--only", default="", metavar="REGEX", help="contenders by name")
    add("--packed", action="store_true", help="one flat weight per block as well, see loops.py")
    add("--compile", action="store_true", help="compiled variants as well")
    add("--deepcompile", action="store_true", help="stage 2 by DeepCompile as well (needs nvcc)")
    add("--hf-loss", action="store_true", help="peers take transformers' own loss")
    add("--no-clip-table", action="store_true", help="leave out: all clip to a norm of 1")
    add("--no-free-table", action="store_true", help="leave out: nobody clips")
    args = parser.parse_args()
    launch = start(args)
    import torch
    torch._dynamo.config.recompile_limit = 64             # one block's code serves all layers
    model = random_model(args)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p, part.training = 0.0, False
    model.config.use_cache = False
    batch = random_batch(args, launch, model)
    environment = describe(args, launch, model) | {
        "flops_per_token": flops_per_token(model, args.seq_len),
        "matrix_flops": matrix_peak(launch),
        "devices": launch.world_size // launch.shared if launch.on_gpu else 1}
    record = {"benchmark": "peers", "environment": environment, "contenders": [], "summary": []}

    def say(line):
        if launch.rank == 0:
            print(line, flush=True)

    say(f"{headline(environment)}\nmatrix peak {environment['matrix_flops'] / 1e12:.2f} TFLOP/s a "
        f"device, measured; {environment['flops_per_token'] / 1e6:.1f} MFLOP a token = 6 N + 6 V d "
        "+ 12 L d T / 2")
    if launch.shared > 1:
        say("ranks share a GPU: memory is what separate GPUs would show, times are not")
    for title, clip, skip in (("all clip to a gradient norm of 1", CLIP, args.no_clip_table),
                              ("nobody clips", 0.0, args.no_free_table)):
        rows = [] if skip else run_table(clip, args, launch, model, batch, record, say)
        if rows and launch.rank == 0:
            summary = compare(rows, environment)
            record["summary"] += summary
            print_table(title, rows, summary)
    if launch.rank == 0:
        if args.json:
            args.json.write_text(json.dumps(record, indent=1))
        raw = ("seconds", "losses", "applied", "steady_seconds", "peak_allocated_bytes_per_rank")
        record["contenders"] = [{key: value for key, value in row.items() if key not in raw}
                                for row in record["contenders"]]
        print(json.dumps(record), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
