"""Own text, checkpoints that survive a kill, and weights that from_pretrained reads."""
import json
import re
import shutil
import subprocess
import sys

import pydoc_data.topics
import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer

from conftest import config, launch, losses
from train_zero2 import Refused, read_pieces

ENGLISH = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
END_OF_TEXT = 50256


def pieces(path, data, size=1 << 16):
    path.write_bytes(data)
    return list(read_pieces(path, size))


def whole(data):
    """The text that a file stands for: no byte-order mark, LF alone."""
    return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


@pytest.fixture(scope="module")
def tokens(tiny):
    """A function from text to GPT-2's token ids, the whole text at once."""
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


# --------------------------------------------------------------------------------- reading text

TEXTS = {
    "english": ENGLISH[:300_000].encode(),
    "crlf": ENGLISH[:50_000].replace("\n", "\r\n").encode(),
    "byte-order mark": b"\xef\xbb\xbf" + ENGLISH[:5000].encode(),
    "a mark inside": (ENGLISH[:500] + "\ufeff" + ENGLISH[:500]).encode(),
    "one long line": ENGLISH[:200_000].replace("\n", " ").encode(),
    "one long word": b"ab" * 100_000,
    "spaces at the seams": ("word" + " " * 4095).encode() * 40,
    "other alphabets": "Größe 数据并行 žluťoučký 🙂🙃 データ ".encode() * 3000,
    "old line ends": b"one\rtwo\r\n\rthree\n" * 500,
    "no white space at the end": b"a b c",
    "end of text inside": b"one story<|endoftext|>another story " * 300}


@pytest.mark.parametrize("size", [7, 64, 4096, 1 << 16])
@pytest.mark.parametrize("name", TEXTS)
def test_tokens_are_those_of_the_whole_text(name, size, tmp_path, tokens):
    data = TEXTS[name][:60 * size].decode(errors="ignore").encode()
    found = pieces(tmp_path / "t.txt", data, size)
    assert "".join(found) == whole(data)
    assert [i for piece in found for i in tokens(piece)] == tokens(whole(data))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])
               | st.sampled_from(" \t\n\r\u00a0\u3000'a1!ß"), max_size=80), st.integers(4, 16))
def test_fuzzed_text(tmp_path, tokens, text, size):
    data = text.encode()
    found = pieces(tmp_path / "t.txt", data, size)
    assert "".join(found) == whole(data)
    assert [i for piece in found for i in tokens(piece)] == tokens(whole(data))


@pytest.mark.parametrize("data, offset", [
    (b"\xff", 0), ("Ein Satz mit Umlauten: äöü".encode("latin-1"), 23),
    (b"a" * 5000 + b"\xc3", 5000), (b"a" * 4095 + b"\xe4\xb8x", 4095),
    ("x".encode("utf-16"), 0)])
def test_bytes_that_are_no_utf8_are_refused_with_their_offset(tmp_path, data, offset):
    for size in (16, 4096):
        with pytest.raises(Refused, match=rf"t\.txt.*UTF-8.*byte {offset}\b"):
            pieces(tmp_path / "t.txt", data, size)


@pytest.mark.parametrize("data, words", [
    (b"", ["0 tokens", "128"]), (b"\n\n   \n\t\n", ["0 tokens", "128"]), (b"word", ["128"]),
    ("Umlaute: äöü".encode("latin-1"), ["UTF-8", "byte 9"])],
    ids=["empty", "blank", "one word", "latin1"])
def test_text_that_cannot_be_used_is_refused(tmp_path, tiny, data, words):
    (tmp_path / "t.txt").write_bytes(data)
    result = launch(tmp_path, "--config", config(tmp_path, micro=2), "--model", tiny, "--data",
                    "t.txt", ok=False, timeout=60)
    assert result.rc == 2 and result.record is None and result.err.count("\n") == 1
    assert all(word in result.err for word in ["refused: --data t.txt", *words]), result.err


def test_two_ranks_refuse_the_text_once(tmp_path, tiny):
    (tmp_path / "t.txt").write_bytes(b"word")
    result = launch(tmp_path, "--config", config(tmp_path), "--model", tiny, "--data", "t.txt",
                    by="deepspeed", ok=False, timeout=60)
    assert result.rc == 2 and (result.out + result.err).count("refused: --data t.txt") == 1
    assert "needs 384" in result.out + result.err                  # 64 tokens x 3 x 2 ranks


# ----------------------------------------------------------- two ranks: batches, kill and resume

STEPS, BLOCK, MICRO = 6, 32, 2


def own_text(folder, model, *arguments, micro=MICRO, **options):
    """Train model on folder/text.txt for six steps, two checkpoints on the way."""
    return launch(folder, "--config", config(folder, micro=micro, **options.pop("keys", {})),
                  "--model", model, "--data", folder / "text.txt", "--steps", STEPS, "--seq-len",
                  BLOCK, *arguments, **options)


@pytest.fixture(scope="module")
def text():
    """CRLF text of a few blocks more than three steps take: the second epoch begins in step 4."""
    return b"\xef\xbb\xbf" + ENGLISH[1000:2600].replace("\n", "\r\n").encode()


def with_text(path, text):
    (path / "text.txt").write_bytes(text)
    return path


@pytest.fixture(scope="module")
def uninterrupted(folder, tiny, text):
    path = with_text(folder(), text)
    return own_text(path, tiny, by="torchrun", patch=f"log={path}")


@pytest.fixture(scope="module")
def killed(folder, tiny, text):
    """Rank 0 dies when its part of the second checkpoint is on disk, before it can say so."""
    path = with_text(folder(), text)
    result = own_text(path, tiny, "--checkpoint", path / "kept", "--checkpoint-every", 2,
                      by="torchrun", patch="kill=after_save_checkpoint:0:2", ok=False, timeout=90)
    assert result.rc != 0 and "injected: kill" in result.err
    shutil.copytree(path / "kept", path / "before")
    return result


@pytest.fixture(scope="module")
def resumed(folder, killed, tiny):
    return own_text(killed.folder, tiny, "--checkpoint", killed.folder / "kept", "--resume",
                    "--checkpoint-every", 2, by="torchrun")


def logged(result, rank):
    """[(ids, labels), ...] of each forward on one rank, as lists of blocks."""
    lines = (result.folder / f"rank{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_each_rank_trains_on_its_own_blocks_of_the_text(uninterrupted, text, tokens):
    stream = tokens(whole(text)) + [END_OF_TEXT]
    count = len(stream) // BLOCK
    known = [tuple(stream[i * BLOCK:(i + 1) * BLOCK]) for i in range(count)]
    seen = [[[tuple(block) for block in ids] for ids, _ in logged(uninterrupted, rank)]
            for rank in (0, 1)]
    order = [block for step in range(STEPS) for rank in (0, 1) for block in seen[rank][step]]
    assert set(order) <= set(known) and len(known) == len(set(known))
    per_epoch = count // (2 * MICRO)
    assert 2 <= per_epoch < STEPS                                 # else this tests nothing
    epochs = [step["epoch"] for step in uninterrupted.record["runs"][0]["steps"]]
    assert epochs == [step // per_epoch for step in range(STEPS)]
    for epoch in range(STEPS // per_epoch):
        at = order[epoch * per_epoch * 2 * MICRO:(epoch + 1) * per_epoch * 2 * MICRO]
        assert len(set(at)) == len(at)                            # no block twice in an epoch
    assert order[:2 * MICRO] != order[per_epoch * 2 * MICRO:][:2 * MICRO]      # shuffled anew
    assert order[:count] != known[:len(order[:count])]
    for ids, labels in logged(uninterrupted, 0):
        assert ids == labels                                      # nothing is masked


def test_tokens_seen(uninterrupted):
    [run] = uninterrupted.record["runs"]
    assert run["tokens_seen"] == STEPS * 2 * MICRO * BLOCK and run["padding_share"] == 0


def test_a_half_written_checkpoint_is_not_pointed_at(killed):
    before = killed.folder / "before"
    assert killed.seconds < 60 and (before / "step4").is_dir()
    assert (before / "latest").read_text().strip() == "step2"


def test_resumed_from_the_last_whole_checkpoint(resumed, uninterrupted):
    [run], [other] = resumed.record["runs"], uninterrupted.record["runs"]
    assert run["resumed_from_step"] == 2                          # not 4, of which half is written
    assert [step["step"] for step in run["steps"]] == [3, 4, 5, 6]
    assert losses(run) == pytest.approx(losses(other)[2:], rel=1e-4)
    assert [step["epoch"] for step in run["steps"]] == [s["epoch"] for s in other["steps"][2:]]
    assert resumed.verdicts["loss_falls"]["outcome"] == "NOT APPLICABLE"


def test_one_checkpoint_is_kept(resumed):
    assert [path.name for path in (resumed.folder / "kept").glob("*step*")] == ["step6"]
    assert (resumed.folder / "kept" / "latest").read_text().strip() == "step6"


@pytest.fixture(scope="module")
def one_rank(resumed, folder):
    """A folder with the text and the checkpoints that the kill left."""
    path = folder()
    shutil.copytree(resumed.folder / "before", path / "kept")
    shutil.copy(resumed.folder / "text.txt", path)
    return path


def test_another_number_of_ranks_is_refused_with_two_steps_that_work(one_rank, uninterrupted, tiny):
    here = ("--checkpoint", one_rank / "kept", "--resume")
    refused = own_text(one_rank, tiny, *here, micro=2 * MICRO, ok=False, timeout=30)
    assert refused.rc == 2 and refused.err.count("\n") == 1
    assert "2 ranks at stage 2" in refused.err and "1 at 2" in refused.err
    command = re.search(r"\(1\) python (.*?) \(2\)", refused.err).group(1)
    key = json.loads("{" + re.search(r'\(2\) add ("checkpoint": \{.*?\})', refused.err).group(1)
                     + "}")
    subprocess.run([sys.executable, *command.split()], check=True, capture_output=True, timeout=120,
                   cwd=one_rank)
    result = own_text(one_rank, tiny, *here, micro=2 * MICRO, keys=key)
    [run], [other] = result.record["runs"], uninterrupted.record["runs"]
    assert run["resumed_from_step"] == 2
    assert losses(run) == pytest.approx(losses(other)[2:], rel=1e-4)
    again = own_text(one_rank, tiny, *here, "--steps", 8, micro=2 * MICRO, keys=key, ok=False,
                     timeout=30)                       # what that run wrote needs no conversion
    assert again.rc == 2 and 'remove "checkpoint.load_universal"' in again.err


@pytest.mark.parametrize("arguments, keys, word", [
    (["--seed", "7"], {}, "seed"), (["--seq-len", "16"], {}, "seq_len"),
    (["--steps", "2"], {}, "step"),
    ([], {"zero_optimization": {"stage": 0}}, "stage"),
    ([], {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps 1, this run 2"),
    ([], {"fp16": {"initial_scale_power": 8}}, "initial_scale_power None, this run 8"),
    ([], {"gradient_clipping": 7.0}, "gradient_clipping 1.0, this run 7.0"),
    ([], {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e5,
                                "round_robin_gradients": True}}, "round_robin_gradients")])
def test_a_checkpoint_of_another_run_is_refused(resumed, tiny, arguments, keys, word, folder):
    path = with_text(folder(), (resumed.folder / "text.txt").read_bytes())
    result = own_text(path, tiny, *arguments, "--checkpoint", resumed.folder / "kept", "--resume",
                      keys=keys, ok=False, timeout=60, env={
                          "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert result.rc == 2 and result.err.count("\n") == 1 and word in result.err


def test_another_text_of_the_same_length_is_refused(resumed, tiny, folder):
    path = with_text(folder(), (resumed.folder / "text.txt").read_bytes().swapcase())
    result = own_text(path, tiny, "--checkpoint", resumed.folder / "kept", "--resume", ok=False,
                      timeout=60, env={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert result.rc == 2 and "the checkpoint has data" in result.err


def test_another_precision_is_refused_before_the_model_is_loaded(tmp_path, small):
    arguments = ("--config", config(tmp_path), "--model", small, "--random-weights", "--checkpoint",
                 tmp_path / "kept")
    launch(tmp_path, *arguments, "--steps", 1)
    result = launch(tmp_path, *arguments, "--steps", 2, "--resume", "--precision", "bf16", ok=False)
    assert result.rc == 2 and result.out == "" and result.err.count("\n") == 1
    assert "the checkpoint is in fp32, this run in bf16" in result.err


@pytest.mark.parametrize("damaged", ["zero_pp_rank_1*", pytest.param(
    "random_rank1.pt", marks=pytest.mark.slow)])
def test_damage_that_one_rank_alone_sees_ends_the_launch(resumed, tiny, folder, damaged):
    path = with_text(folder(), (resumed.folder / "text.txt").read_bytes())
    shutil.copytree(resumed.folder / "before", path / "kept")
    [file] = (path / "kept" / "step2").glob(damaged)
    file.write_bytes(file.read_bytes()[:100])
    result = own_text(path, tiny, "--checkpoint", path / "kept", "--resume", by="torchrun",
                      ok=False, timeout=90)
    assert result.rc == 1 and "step2 cannot be loaded" in result.err


@pytest.mark.parametrize("damage", ["empty", "no pointer", "pointer to nothing", "half"])
def test_no_whole_checkpoint_is_refused(tmp_path, resumed, tiny, damage):
    shutil.copytree(resumed.folder / "kept", tmp_path / "kept")
    shutil.copy(resumed.folder / "text.txt", tmp_path)
    pointer = tmp_path / "kept" / "latest"
    if damage == "empty":
        shutil.rmtree(tmp_path / "kept")
        (tmp_path / "kept").mkdir()
    elif damage == "no pointer":
        pointer.unlink()
    elif damage == "pointer to nothing":
        pointer.write_text("step9")
    else:
        (tmp_path / "kept" / "step6" / "train_zero2.json").write_text('{"world_size": 2')
    result = own_text(tmp_path, tiny, "--checkpoint", tmp_path / "kept", "--resume", ok=False,
                      timeout=60)
    assert result.rc == 2 and result.err.count("\n") == 1 and "no whole checkpoint" in result.err
    assert "in a new folder" in result.err


def test_only_our_checkpoints_are_cleared_away(tmp_path, small):
    notes = tmp_path / "kept" / "step_notes"
    notes.mkdir(parents=True)
    (notes / "a").write_text("mine")
    (tmp_path / "kept" / "steps.txt").write_text("mine")
    launch(tmp_path, "--config", config(tmp_path), "--model", small, "--random-weights", "--steps",
           3, "--checkpoint", tmp_path / "kept", "--checkpoint-every", 1)
    assert sorted(path.name for path in (tmp_path / "kept").glob("step*")) == [
        "step3", "step_notes", "steps.txt"]
    assert (notes / "a").read_text() == "mine"


def test_weights_that_lack_a_layer_are_refused(tmp_path, tiny):
    shutil.copytree(tiny, tmp_path / "model")
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape | {"n_layer": 3}))
    result = launch(tmp_path, "--config", config(tmp_path), "--model", tmp_path / "model", ok=False)
    assert result.rc == 2 and result.err.count("\n") == 1
    assert "missing" in result.err and "h.2" in result.err


def test_random_state_is_resumed(folder, small, text):
    """Dropout, two micro-batches a step, one process: stopped after three steps, gone on with."""
    def run(path, steps, *more):
        result = launch(path, "--config", config(path, micro=1, gradient_accumulation_steps=2),
                        "--model", small, "--random-weights", "--data", path / "text.txt",
                        "--seq-len", BLOCK, "--steps", steps, *more)
        return result.record["runs"][0]
    paths = [with_text(folder(), text) for _ in range(2)]
    straight = losses(run(paths[0], 6))
    first = losses(run(paths[1], 3, "--checkpoint", paths[1] / "kept"))
    second = losses(run(paths[1], 6, "--checkpoint", paths[1] / "kept", "--resume"))
    assert first + second == pytest.approx(straight, rel=1e-4)


# ------------------------------------------------------------------------------------- weights

RELOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, precision = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
exact = all(torch.equal(p, p.to(torch.bfloat16).float()) for p in model.parameters())
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.pad_token = tokenizer.eos_token
batch = tokenizer(["DeepSpeed enables large model training with ZeRO.",
                   "GPT-2 is a transformer-based language model.",
                   "Gradient partitioning reduces memory redundancy across GPUs."],
                  padding="max_length", max_length=64, padding_side="right", return_tensors="pt")
labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
with torch.no_grad():
    loss = model.to(getattr(torch, precision)).eval()(**batch, labels=labels).loss
print("LOSS", json.dumps([float(loss), exact, len(tokenizer)]))
"""


@pytest.mark.parametrize("stage, precision", [(2, "bfloat16"), *(pytest.param(
    *other, marks=pytest.mark.slow) for other in ((0, "float16"), (1, "float32")))])
def test_saved_weights_give_the_same_loss(folder, tiny, stage, precision):
    path, key = folder(), {"float16": "fp16", "bfloat16": "bf16"}.get(precision)
    keys = {key: {"enabled": True}} if key else {}
    if key == "fp16":
        keys[key] |= {"initial_scale_power": 10}
    result = launch(
        path, "--config", config(path, zero_optimization={"stage": stage}, **keys), "--model", tiny,
        "--steps", 4, "--save", path / "out" / "model", by="torchrun", patch="fp16")
    [run] = result.record["runs"]
    assert run["saved"]["path"] == str(path / "out" / "model") and run["skipped_steps"] == 0
    done = subprocess.run([sys.executable, "-c", RELOAD, path / "out" / "model", precision],
                          check=True, capture_output=True, text=True, timeout=120)
    loss, exact, vocabulary = json.loads(done.stdout.split("LOSS")[1])
    assert loss == pytest.approx(run["saved"]["eval_loss"], rel=1e-5 if key is None else 2e-3)
    assert loss < run["steps"][-1]["loss"] and vocabulary == 50257
    assert exact is False                     # fp32 masters, not what 16 bits had left of them
    assert [entry.name for entry in (path / "out").iterdir()] == ["model"]
