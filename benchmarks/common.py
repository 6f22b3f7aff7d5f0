"""What the benchmarks share: flags, the launch, a model with random weights, tokens, a config."""
import argparse
import logging
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_zero2 as T                                                      # noqa: E402

ZERO, synchronize = T.ZERO, T.synchronize


def new_parser(docstring, micro_batch=3, seq_len=64):
    """The flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=docstring.split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="gpt2", choices=list(T.GPT2_SIZES), help="random weights (gpt2)")
    add("--micro-batch", type=int, default=micro_batch, help=f"samples per rank ({micro_batch})")
    add("--seq-len", type=int, default=seq_len, help=f"tokens per sample ({seq_len})")
    add("--precision", choices=("auto", "fp16", "bf16", "fp32"), default="auto",
        help="auto: fp16 on a GPU, fp32 on a CPU")
    add("--share-gpu", action="store_true", help="several ranks on one GPU")
    add("--seed", type=int, default=0, help="weights and tokens (0)")
    add("--json", type=Path, metavar="FILE", help="every figure, raw")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(verbose=False)
    return parser


def start(args):
    """Join the ranks, quietly; settles args.precision. Returns train_zero2's Launch."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    try:
        launch = T.read_launch()
        T.connect(launch, args)
    except (T.Refused, T.RunFailed) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if args.precision == "auto":
        args.precision = "fp16" if launch.on_gpu else "fp32"
    return launch


def random_model(args):
    """The model of --model with random weights, as train_zero2 loads it (fp32, on the CPU)."""
    found = {"name": args.model, "folder": None, "pretrained": False}
    return T.load_model(found, T.load_config(found), args.seed)


def random_batch(args, launch, model):
    """(ids, labels), each (micro-batch, seq-len) int64 on the device; distinct on every rank."""
    import torch
    generator = torch.Generator().manual_seed(args.seed + launch.rank)
    size = (args.micro_batch, args.seq_len)
    ids = torch.randint(model.config.vocab_size, size, generator=generator).to(launch.device)
    return ids, ids


def resolve(args, launch, stage=2, **changes):
    """train_zero2's resolved config (dotted) for a stage, with the flags and changes applied."""
    name = "ds_config_zero2.json" if stage else "ds_config_stage0.json"
    config = T.flatten(T.read_config(T.HERE / name)) | {
        "train_micro_batch_size_per_gpu": args.micro_batch, ZERO + "stage": stage}
    config |= {f"{p}.enabled": p == args.precision for p in ("fp16", "bf16")}
    return T.check_config(T.unflatten(config | changes), launch.world_size)


def describe(args, launch, model):
    """What the figures depend on."""
    import deepspeed
    import torch
    import transformers
    return {"command": " ".join(sys.argv), "world_size": launch.world_size,
            "backend": launch.backend, "ranks_per_gpu": launch.shared, "model": args.model,
            "device": torch.cuda.get_device_name(launch.device) if launch.on_gpu else "CPU",
            "parameters": sum(p.numel() for p in model.parameters()),
            "micro_batch": args.micro_batch, "seq_len": args.seq_len,
            "precision": args.precision, "torch": torch.__version__,
            "deepspeed": deepspeed.__version__, "transformers": transformers.__version__}


def headline(environment):
    """The environment in one line."""
    e = environment
    return (f"{e['model']}, {e['world_size']} rank(s) x {e['micro_batch']} x {e['seq_len']} tokens,"
            f" {e['precision']}, {e['device']}, {e['backend']}; torch {e['torch']}, deepspeed "
            f"{e['deepspeed']}, transformers {e['transformers']}")
