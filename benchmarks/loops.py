"""The training loops that peers.py compares, each with step, applied and close.

step(memory, ids, labels) makes one optimizer step, by train_zero2's phases forward, backward and
step, and returns this rank's loss, a tensor; applied() says whether the loss scaler let it pass.
"""
import copy
import types
import unittest.mock

from common import T, ZERO, resolve


class TorchLoop:
    """kind "plain", "DDP", "DDP + ZRO" or "FSDP2", as PyTorch's documentation writes the loop."""

    def __init__(self, kind, args, launch, model, clip, compiled=False, packed=False,
                 precision=None):
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel
        self.device, self.clip = launch.device, clip
        precision = precision or args.precision
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        module = copy.deepcopy(model)
        if packed:
            pack(module)
        module = module if args.hf_loss else T.define_loss(module)
        if kind == "FSDP2":
            shard(module, launch, dtype, compiled)
        else:
            module.to(self.device)
        if kind.startswith("DDP"):
            module = DistributedDataParallel(
                module, device_ids=[self.device.index] if launch.on_gpu else None,
                broadcast_buffers=False, gradient_as_bucket_view=True)
        self.parameters = list(module.parameters())
        self.module = torch.compile(module) if compiled and kind != "FSDP2" else module
        config = resolve(args, launch)
        settings = {path.rpartition(".")[2]: value for path, value in config.items()
                    if path.startswith("optimizer.params.") and not path.endswith("torch_adam")}
        if kind == "DDP + ZRO":
            self.optimizer = ZeroRedundancyOptimizer(
                self.parameters, torch.optim.AdamW, parameters_as_bucket_view=True, **settings)
        else:
            self.optimizer = torch.optim.AdamW(self.parameters, **settings)
        on = dtype is not None and kind != "FSDP2"
        self.autocast = torch.autocast(self.device.type, dtype, enabled=on)
        self.scaler = torch.amp.GradScaler(
            self.device.type, init_scale=2.0 ** config.get("fp16.initial_scale_power", 16),
            enabled=precision == "fp16")
        self.scale = self.scaler.get_scale()

    def step(self, memory, ids, labels):
        import torch
        with memory.phase("forward"), self.autocast:
            loss = self.module(ids, labels=labels)
            loss = getattr(loss, "loss", loss)            # --hf-loss: lets go of the logits
        with memory.phase("backward"):
            self.scaler.scale(loss).backward()
        loss = loss.detach()
        with memory.phase("step"):
            if self.clip:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return loss

    def applied(self):
        before, self.scale = self.scale, self.scaler.get_scale()
        return self.scale >= before                       # halved where a step was skipped

    def close(self):
        """Give weights and gradients back: FSDP2 and DDP hold on to them after their module."""
        for parameter in self.parameters:
            for tensor in (parameter.data, parameter.grad):
                if tensor is not None:
                    getattr(tensor, "_local_tensor", tensor).untyped_storage().resize_(0)


def shard(module, launch, dtype, compiled):
    """FSDP2 over every block and the root, in place; parameters go to the device as shards."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    # The default group; init_device_mesh can make an NCCL group of its own beside a gloo one.
    settings = {"mesh": DeviceMesh.from_group(dist.group.WORLD, launch.device.type),
                "mp_policy": MixedPrecisionPolicy(param_dtype=dtype),
                "reshard_after_forward": False}
    for block in getattr(module, "model", module).transformer.h:
        if compiled:                                      # the hooks stay outside the graph
            block.forward = torch.compile(block.forward)
        fully_shard(block, **settings)
    fully_shard(module, **settings)
    for part in module.modules():
        if isinstance(part, FSDPModule) and launch.backend == "gloo":
            part.set_force_sum_reduction_for_comms(True)  # gloo has no average


class DeepSpeedLoop:
    """train_zero2's own code path: build_engine with its repairs, then train_step.

    groups: so many parameter groups of whole blocks, then one of the embeddings, so that the
    optimizer step's fp32 copy is one group's. packed: see pack. one_check: the overflow check of
    all gradients in GradScaler's multi-tensor kernel in place of DeepSpeed's, which takes six
    kernels per weight; only to tell what that one costs.
    """

    def __init__(self, stage, args, launch, model, clip, compiled=False, packed=False,
                 groups=None, one_check=False, **changes):
        import deepspeed
        changes |= {"gradient_clipping": clip}
        if stage:
            changes |= {ZERO + "compute_grad_norm": bool(clip)}
        run = T.Run(f"stage{stage}", resolve(args, launch, stage, **changes), {})
        flags = types.SimpleNamespace(compile=compiled, seed=args.seed)
        initialize = by_blocks(deepspeed.initialize, groups) if groups else deepspeed.initialize
        initialize = packing(initialize) if packed else initialize
        with unittest.mock.patch("deepspeed.initialize", initialize):
            self.engine, self.repairs = T.build_engine(run, launch, model, flags,
                                                       T.PeakMemory(launch))
        if one_check:
            self.engine.optimizer.has_overflow_partitioned_grads_serial = types.MethodType(
                overflow_in_one_kernel, self.engine.optimizer)

    def step(self, memory, ids, labels):
        return T.train_step(self.engine, [(ids, labels)], memory, self.repairs)[0]

    def applied(self):
        return bool(self.engine.was_step_applied())

    def close(self):
        self.engine.destroy()


def by_blocks(initialize, number):
    """deepspeed.initialize with number groups of whole blocks; embeddings and the rest last."""
    def grouped(model, model_parameters, **settings):
        blocks = model.model.transformer.h
        each = -(-len(blocks) // number)
        groups = [list(blocks[i:i + each].parameters()) for i in range(0, len(blocks), each)]
        inside = {id(p) for group in groups for p in group}
        groups.append([p for p in model_parameters if id(p) not in inside])
        return initialize(model=model, model_parameters=[{"params": g} for g in groups], **settings)
    return grouped


def packing(initialize):
    """deepspeed.initialize on a model whose weights are packed first."""
    def packed(model, **settings):
        pack(model.model)
        return initialize(model=model, **settings | {"model_parameters": [*model.parameters()]})
    return packed


def pack(model):
    """Make the weights of each block views of one flat parameter, in place; 148 weights become 16.

    FSDP1 did so (FlatParameter). Whatever works once per weight then does so once per block; the
    backward of the views joins a block's gradients in one copy.
    """
    import torch
    for block in model.transformer.h:
        weights = [(part, *named) for part in block.modules()
                   for named in part.named_parameters(recurse=False)]
        block.flat = torch.nn.Parameter(torch.cat([w.detach().flatten() for *_, w in weights]))
        places = [(part, name, weight.shape) for part, name, weight in weights]
        for part, name, _ in places:
            delattr(part, name)

        def unpack(block, inputs, places=places):
            pieces = block.flat.split([shape.numel() for *_, shape in places])
            for (part, name, shape), piece in zip(places, pieces):
                vars(part)[name] = piece.view(shape)      # Module.__setattr__ costs more

        block.register_forward_pre_hook(unpack)


def overflow_in_one_kernel(optimizer):
    """Whether any gradient of this rank is not finite, as a tensor (1,) on its device."""
    import torch
    grads = [g for group in optimizer.averaged_gradients.values() for g in group if g is not None]
    found, one = (torch.full((1,), v, device=grads[0].device) for v in (0.0, 1.0))
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, one)
    return found.bool()
