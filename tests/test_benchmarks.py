"""The benchmarks that need no GPU to be wrong: what they compare has to be the same training."""
import copy
import json
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))


def test_packed_weights_give_the_same_loss_and_gradients():
    import loops
    import torch
    from common import T
    found = {"name": "gpt2-tiny", "folder": None, "pretrained": False}
    model = T.load_model(found, T.load_config(found), 0).eval()
    packed = copy.deepcopy(model)
    loops.pack(packed)
    assert len([*model.parameters()]) == 28 and len([*packed.parameters()]) == 6
    ids = torch.arange(60).reshape(2, 30)
    losses = [T.define_loss(m)(ids, ids) for m in (model, packed)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    for one, other in zip(model.transformer.h, packed.transformer.h):
        whole = torch.cat([p.grad.flatten() for p in one.parameters()])
        torch.testing.assert_close(whole, other.flat.grad, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_peers_train_alike(ranks):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={ranks}"] if ranks > 1 else [sys.executable]
    done = subprocess.run(
        [*launcher, str(ROOT / "benchmarks" / "peers.py"), "--model", "gpt2-tiny", "--packed",
         "--no-free-table", "--steps", "3", "--warm-up", "1", "--only",
         "^(plain|DDP|FSDP2)|^DeepSpeed (0|2|2 1e7 groups)( packed)?$"], capture_output=True,
        text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])["contenders"]
    names = {row["name"] for row in rows}
    assert {"FSDP2 fp32", "DeepSpeed 0", "DeepSpeed 2", "DeepSpeed 2 packed"} < names
    assert [row for row in rows if row["error"]] == []
    assert max(row["loss_difference"] for row in rows) < 1e-5
