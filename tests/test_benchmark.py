"""scripts/benchmark.py: its arithmetic against torch's own counter, and each command run on a model of no size."""

import itertools
import json
import math
import statistics
import sys

import pytest
import torch
from script_modules import SCRIPTS
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(SCRIPTS))

import benchmark
from benchmarking import contenders, decoding, growth, learning, loading, losses, machine, report, training, workload

MINIATURE = {"layers": 1, "d_model": 16, "d_ff": 32, "heads": 2}


@pytest.fixture(autouse=True)
def miniature(monkeypatch):
    """A size that takes no time, and one thread as before."""
    threads = torch.get_num_threads()
    monkeypatch.setitem(workload.SIZES, "tiny", MINIATURE)
    monkeypatch.setitem(machine.GEMM_SIZE, "cpu", 64)
    yield
    torch.set_num_threads(threads)


def run(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    benchmark.main()
    return capsys.readouterr().out


# ---------------------------------------------------------------------------------------- arithmetic


def test_training_flops_are_what_torch_counts():
    config = workload.Workload("base", 1000).config(
        d_model=32, encoder_layers=2, decoder_layers=3, encoder_ffn_dim=48, decoder_ffn_dim=80
    )
    config._attn_implementation = "eager"
    config.dropout = 0.0
    model = workload.VanillaTransformerForConditionalGeneration(config).train()
    model.lm_head.register_forward_hook(lambda *_: None)  # no fused loss: torch's counter does not know its addmm_
    pairs, source, target = 3, 7, 9
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(3, 99, (pairs, source)), labels=torch.randint(3, 99, (pairs, target))).loss.backward()
    by_operation = counter.get_flop_counts()["Global"]
    attention = by_operation.pop(torch.ops.aten.bmm)
    # Of attention to what comes later, which the eager kernel computes and then masks, the formula counts nothing.
    masked = 12 * config.d_model * config.decoder_layers * pairs * target * (target - 1) / 2
    expected = workload.training_flops(config, [source] * pairs, [target] * pairs)
    assert sum(by_operation.values()) + attention - masked == pytest.approx(expected, rel=1e-3)


def test_contenders_take_turns_and_ratios_are_taken_within_a_round():
    calls = []
    values = iter([1.0, 2.0, 30.0, 10.0, 4.0, 8.0])

    def record(name):
        calls.append(name)
        return next(values)

    results = machine.alternate({name: (lambda name=name: record(name)) for name in "ab"}, 3)
    assert "".join(calls) == "abbaab"
    assert results == {"a": [1.0, 10.0, 4.0], "b": [2.0, 30.0, 8.0]}
    assert machine.paired_ratio(results["b"], results["a"]) == 2.0  # of 2, 3 and 2; the ratio of the medians too


def test_no_round_begins_after_the_time_but_one_is_always_run(monkeypatch):
    clock = itertools.count(0.0, 10.0)  # a look at it takes ten seconds
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.alternate({"a": lambda: 1.0}, 9, 25.0) == {"a": [1.0] * 3}
    assert machine.alternate({"a": lambda: 1.0}, 9, 0.0) == {"a": [1.0]}


def test_all_commands_together_are_brief(monkeypatch):
    seen = []
    monkeypatch.setattr(training, "benchmark", lambda workload, *_, **options: seen.append((workload, options)) or [])
    monkeypatch.setattr(workload, "generated_pairs", lambda vocab_size, count: [])
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "train"])
    (arguments,) = benchmark.parse(["--tokens_per_update", "4096"], "", [benchmark.BenchmarkArguments])
    benchmark.Benchmark(arguments, brief=True).train()
    assert [(made.size, made.vocab_size) for made, _ in seen] == [
        *(("small", 8_000), ("small", 37_000)),
        *(("base", 8_000), ("base", 37_000)),
    ]
    assert [options["with_memory"] for _, options in seen] == [False, False, False, True]
    others = (contenders.OURS, contenders.RANDOM, contenders.GROUPED, contenders.TORCH_NN)
    assert [options["contenders"] for _, options in seen[1:]] == [others] * 3
    assert seen[0][1]["contenders"][:4] == others
    same = {(options["updates"], options["tokens_per_update"], options["seconds"]) for _, options in seen}
    assert same == {(1, 4096, 60.0)}


def test_generated_pairs_have_the_lengths_of_captions_and_repeat():
    pairs = workload.generated_pairs(500, 3000)
    for column, mean in (("input_ids", 14.5), ("labels", 15.8)):
        lengths = [len(row) for row in pairs[column]]
        assert statistics.mean(lengths) == pytest.approx(mean, abs=0.8)
        assert 4 <= min(lengths) < 8
        assert 30 < max(lengths) <= 50
        assert all(row[-1] == workload.EOS and workload.EOS not in row[:-1] for row in pairs[column])
    assert pairs.to_dict() == workload.generated_pairs(500, 3000).to_dict()


def growth_of_peak() -> int:
    """Return by how much 128 MiB more raise the peak of a fresh process, whatever its imports took for a moment."""
    machine.reset_peak_memory()
    before = machine.peak_memory()
    torch.ones(2**25)
    return machine.peak_memory() - before


def test_a_process_knows_its_own_peak():
    assert 2**27 - 2**23 < machine.in_own_process(growth_of_peak) < 2**27 + 2**24


def test_the_peers_learn_what_ours_learns():
    # All see the same loss at the start, that of a uniform guess with smoothing, whatever its reduction.
    size = workload.Workload("tiny", 50)
    torch.manual_seed(0)
    source, labels = torch.randint(3, 50, (40, 5)), torch.randint(3, 50, (40, 6))
    ours = size.ours().train()(source, labels=labels).loss.item()
    plain = contenders.PlainTransformer(size).train()(source, labels).item() / labels.numel()
    assert ours == pytest.approx(math.log(50), rel=0.25)
    assert plain == pytest.approx(math.log(50), rel=0.25)


def test_tables_are_markdown():
    table = report.table(["a", "bb"], [["x", 1], ["yy", 22]])
    assert table == "| a  | bb |\n|----|---:|\n| x  |  1 |\n| yy | 22 |"


# ---------------------------------------------------------------------------------------- commands


def test_train_compares_all_and_writes_the_figures(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(contenders, "BATCH_SIZES", {"cpu": (4, 8)})
    monkeypatch.setattr(contenders, "TOKEN_BUDGETS", {"cpu": (64, 128)})
    monkeypatch.setattr(contenders, "UNSORTED_TOKEN_BUDGETS", {"cpu": (64, 128)})
    out = tmp_path / "results.json"
    flags = ["--size", "tiny", "--vocab_size", "300", "--tokens_per_update", "128", "--rounds", "2", "--updates", "2"]
    text = run(monkeypatch, capsys, "train", *flags, "--threads", "1", "--no_memory", "true", "--output", str(out))
    results = json.loads(out.read_text())
    names = [row["contender"] for row in results["train"]]
    optional = [] if contenders.why_no_joeynmt() else [contenders.JOEYNMT]
    other = f"{contenders.OURS}, the other precision"
    assert names == [contenders.OURS, contenders.RANDOM, contenders.GROUPED, contenders.TORCH_NN, *optional, other]
    first, last = results["train"][0], results["train"][-1]
    assert {first["settings"].split()[-1], last["settings"].split()[-1]} == {"fp32", "bf16"}
    assert all(name in text for name in names)
    assert ("JoeyNMT takes no part: " in text) is not bool(optional)
    for row in results["train"]:
        assert row["tokens_per_second"] > 0
        assert len(row["all_rounds"]) == 2
    assert results["train"][0]["ours_over_this"] == 1.0
    assert results["machine"]["threads"] == 1


def test_the_library_grouping_by_length_gets_all_of_its_epoch():
    # An update has the tokens asked for on the average only: the library's epoch begins with the longest pairs.
    pairs = workload.generated_pairs(300, 2000)
    bench = contenders.TrainingBench(workload.Workload("tiny", 300), pairs, workload.word_tokenizer(300), "cpu")
    run = bench.make(contenders.GROUPED, contenders.Settings(16, False, 512))
    updates = 2000 // 32
    assert run(updates).tokens / updates == pytest.approx(512, rel=0.1)
    found = [run(1).tokens for _ in range(30)]
    assert min(found) < 450 < 550 < max(found)
    assert statistics.mean(found) == pytest.approx(512, rel=0.2)


def test_settings_that_are_known_are_not_tried_again(monkeypatch):
    tried = []

    def settings(bench, name, *_):
        tried.append(name)
        return contenders.Settings(64, False, 64)

    monkeypatch.setattr(training, "best_settings", settings)
    arguments = (workload.Workload("tiny", 300), workload.generated_pairs(300, 50), workload.word_tokenizer(300))
    options = {"tokens_per_update": 64, "updates": 1, "rounds": 1, "device": "cpu", "with_memory": False}
    names = (contenders.OURS, contenders.TORCH_NN)
    known = {contenders.OURS: contenders.Settings(128, False, 64)}
    rows = training.benchmark(*arguments, **options, contenders=names, precisions=(False,), known=known)
    assert tried == [contenders.TORCH_NN]
    assert [row["settings"] for row in rows] == ["128 fp32", "64 fp32"]
    assert known[contenders.TORCH_NN] == contenders.Settings(64, False, 64)


def test_an_update_has_about_the_tokens_asked_for():
    pairs = workload.generated_pairs(300, 3000)
    bench = contenders.TrainingBench(workload.Workload("tiny", 300), pairs, workload.word_tokenizer(300), "cpu")
    sizes = [(contenders.OURS, 256), (contenders.RANDOM, 16), (contenders.TORCH_NN, 256)]
    if contenders.why_no_joeynmt() is None:
        sizes.append((contenders.JOEYNMT, 256))
    for name, batch in sizes:
        run = bench.make(name, contenders.Settings(batch, False, 1000))
        for updates in (4, 2):
            meter = run(updates)
            assert len(meter.ends) == updates
            assert meter.tokens / updates == pytest.approx(1000, rel=0.3), name


@pytest.fixture
def joey():
    pytest.importorskip("joeynmt")
    if why := contenders.why_no_joeynmt():
        pytest.skip(why)
    from benchmarking import joey

    return joey


def test_joeynmt_has_our_model_tokens_and_sizes(joey):
    size = workload.Workload("base", 320)
    pairs = joey.Pairs(workload.generated_pairs(300, 50), workload.word_tokenizer(300), 320)
    assert len(pairs.vocabulary) == 320
    assert pairs.vocabulary._itos[:4] == ["<s>", "<pad>", "</s>", "w3"]  # the private names that `_Vocabulary` sets
    assert pairs.vocabulary.lookup("w299") == 299
    sizes = workload.SIZES["base"]
    biases = 3 * sizes["layers"] * 4 * sizes["d_model"]  # of its attention; the paper's has none
    model = joey.model(size, pairs.vocabulary)
    assert sum(p.numel() for p in model.parameters()) == size.ours().num_parameters() + biases
    assert model.src_embed.lut.weight is model.trg_embed.lut.weight is model.decoder.output_layer.weight


def test_joeynmt_sees_every_pair_once_an_epoch_and_learns_it(joey):
    dataset = workload.generated_pairs(300, 50)
    pairs = joey.Pairs(dataset, workload.word_tokenizer(300), 300)
    loader, mean = pairs.batches(200, "cpu")
    batches = list(itertools.islice(loader, None))  # list() would ask for its length, which it refuses to give
    assert sorted(i for batch in batches for i in batch.indices.tolist()) == list(range(50))
    assert sum(batch.ntokens for batch in batches) == sum(map(len, dataset["labels"])) == pairs.target_tokens
    assert mean == pytest.approx(pairs.target_tokens / len(batches), rel=0.3)
    batch = batches[0]
    row = batch.trg[0][batch.trg[0] != pairs.vocabulary.pad_index]
    tokens = workload.word_tokenizer(300).convert_ids_to_tokens(dataset["labels"][int(batch.indices[0])])
    assert [pairs.vocabulary._itos[i] for i in row] == tokens
    model = joey.model(workload.Workload("tiny", 300), pairs.vocabulary)
    optimizer = joey.optimizer(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.01
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(return_type="loss", **vars(batch))[0] / batch.ntokens
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    smoothing = 0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 298)  # its loss is a divergence: less this entropy
    assert losses[0] == pytest.approx(math.log(300) + smoothing, rel=0.25)
    assert losses[-1] < losses[0] - 1


def test_joeynmt_has_a_whole_update_in_one_batch_where_memory_is_measured(joey):
    pairs = workload.generated_pairs(300, 3000)
    bench = contenders.TrainingBench(workload.Workload("tiny", 300), pairs, workload.word_tokenizer(300), "cpu")
    _, mean = bench.joey_pairs.batches(bench.whole_batch(contenders.JOEYNMT, 1000), "cpu")
    assert mean == pytest.approx(1000, rel=0.15)


def test_without_joeynmt_the_error_says_so(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "benchmarking.joey", raising=False)
    monkeypatch.delattr(sys.modules["benchmarking"], "joey", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "joeynmt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "joeynmt", None)  # what an import of it then finds
    with pytest.raises(SystemExit) as refused:
        run(monkeypatch, capsys, "train", "--contenders", "joeynmt")
    message = f"{refused.value} {capsys.readouterr().err}"
    assert "--contenders joeynmt cannot take part (" in message
    assert "joeynmt" in message.partition("(")[2]
    assert "install it as --help says" in message


def test_memory_of_training_is_that_of_the_process_of_its_own():
    pairs = workload.generated_pairs(300, 200).to_dict()
    settings = contenders.Settings(64, False, 64)
    arguments = (workload.Workload("base", 300), contenders.OURS, settings, pairs, "cpu")
    memory = machine.in_own_process(training.peak_memory_of, *arguments)
    parameters = workload.Workload("base", 300).ours().num_parameters()
    assert memory["peak"] - memory["before"] > 12 * parameters  # weights, gradients and Adam's moments, and no less


def test_loss_is_the_same_both_ways_and_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(losses, "peak_memory_of", lambda *_: 0)
    rows = losses.benchmark([(16, 300)], tokens=50, rounds=2, device="cpu", with_memory=False)
    assert [row["bf16"] for row in rows] == [False, True]
    assert all(row["plain_over_fused"] > 0 for row in rows)
    hidden, lm_head, labels = losses._inputs(16, 300, 50, "cpu")
    gradients = []
    for kind in (losses.FUSED, losses.PLAIN):
        losses._run(kind, hidden, lm_head, labels, False)
        gradients.append(lm_head.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_decode_gives_the_same_translations_by_all(monkeypatch, capsys):
    pytest.importorskip("ctranslate2")
    model = workload.Workload("tiny", 60).ours().eval()
    sources = list(workload.generated_pairs(60, 12)["input_ids"])
    task = decoding.Task(sources, 3, None, workload.PAD, workload.EOS)
    decoders = decoding.decoders(model, task, 1, with_ctranslate2=True)
    rows = decoding.benchmark(decoders, task, rounds=1, threads=2, score=lambda outputs: 1.5)
    found = {row["contender"]: row for row in rows}
    assert found["MarianMT fp32"]["same_as_ours"] >= 11
    assert found[decoding.OURS]["same_as_ours"] == 12
    assert {row["bleu"] for row in rows} == {1.5}


def test_a_checkpoint_translates_the_end_of_the_data(monkeypatch, tmp_path):
    # And its own test text, if there is any; only a model of the grammar translates the grammar.
    model = workload.Workload("tiny", 60).ours().eval()
    tokenizer = workload.word_tokenizer(60)
    monkeypatch.setattr("loading.load_model", lambda *_, **__: (model, tokenizer))
    for name in ("train", "test"):
        for side in ("en", "de"):
            (tmp_path / f"{name}.{side}").write_text("".join(f"{name} {side} {n}\n" for n in range(1003)))
    data, test = ([str(tmp_path / f"{name}.{side}") for side in ("en", "de")] for name in ("train", "test"))
    seen = []
    monkeypatch.setattr("sacrebleu.corpus_bleu", lambda texts, references: seen.append(references[0]) or Score())
    for flags, count, first in (([], 1000, "train de 3"), (["--test_data", *test], 1003, "test de 0")):
        words = ["--data", *data, "--checkpoint", "somewhere", *flags]
        (arguments,) = benchmark.parse(words, "", [benchmark.BenchmarkArguments])
        _, task, score, what = benchmark.Benchmark(arguments).trained
        score([[5]] * count)
        assert len(task.sources) == len(seen[-1]) == count
        assert seen[-1][0] == first
        assert (test if flags else data)[0] in what


class Score:
    """Stands in for what sacreBLEU returns."""

    score = 0.0


def test_decode_of_forced_length(monkeypatch):
    model = workload.Workload("tiny", 60).ours().eval()
    task = decoding.Task([[5, 6, 7, 1], [9, 1]], 2, 6, workload.PAD, workload.EOS)
    outputs = decoding.by_generate(model, task, length_penalty=1.0)(task.sources, decoding.SearchSettings(1, 2))
    assert [len(row) for row in outputs] == [6, 6] or all(len(row) >= 5 for row in outputs)


def test_learn_draws_a_curve_for_each(monkeypatch, tmp_path):
    from vanilla_transformer.corpus import encode_pairs
    from vanilla_transformer.phrase_grammar import generate_splits
    from vanilla_transformer.tokenizer_training import train_tokenizer

    pairs = generate_splits().train[:200]
    tokenizer = train_tokenizer([text for pair in pairs for text in pair], vocab_size=400)
    texts = workload.datasets.Dataset.from_dict({"source": [s for s, _ in pairs], "target": [t for _, t in pairs]})
    dataset, _ = encode_pairs(texts, tokenizer)
    curves = learning.benchmark(
        workload.Workload("tiny", len(tokenizer)),
        dataset,
        pairs[:4],
        tokenizer,
        minutes=0.01,
        learning_rate=1e-3,
        tokens_per_batch=128,
        points=2,
        contenders=(contenders.OURS, contenders.RANDOM),
    )
    for points in curves.values():
        assert len(points) == 2
        assert points[0]["tokens"] < points[1]["tokens"]
        assert 0 < points[0]["minutes"] < points[1]["minutes"]
    learning.plot(curves, tmp_path / "learn.png", "title")
    assert (tmp_path / "learn.png").read_bytes().startswith(b"\x89PNG")


def test_growth_measures_and_draws(monkeypatch, tmp_path):
    brief_growth(monkeypatch)
    curves = growth.benchmark(workload.Workload("tiny", 2000), rounds=1, device="cpu")
    assert [curve["name"] for curve in curves] == ["encode", "decode", "decode", "train, 1,024 tokens"]
    assert all(len(curve["x"]) == len(curve["y"]) == len(curve["expected"]) for curve in curves)
    growth.plot(curves, tmp_path / "growth.png", "title")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_load_times_both(monkeypatch, capsys):
    text = run(monkeypatch, capsys, "load", "--size", "tiny", "--rounds", "1", "--threads", "1")
    assert "MarianMT" in text
    assert "vanilla-transformer" in text


@pytest.fixture
def corpus_and_model(tmp_path):
    """Flags that name a small text and a model of it."""
    lines = [f"w{3 + n % 40} w{3 + n // 3 % 40} w{3 + n % 7}" for n in range(40)]
    for side in ("en", "de"):
        (tmp_path / f"text.{side}").write_text("".join(f"{line}\n" for line in lines))
    workload.Workload("tiny", 60).ours().save_pretrained(tmp_path / "model")
    workload.word_tokenizer(60).save_pretrained(tmp_path / "model")
    files = [str(tmp_path / f"text.{side}") for side in ("en", "de")]
    return ["--data", *files, "--test_data", *files, "--checkpoint", str(tmp_path / "model"), "--size", "tiny"]


def brief_growth(monkeypatch) -> None:
    monkeypatch.setattr(growth, "LENGTHS", (8, 16))
    monkeypatch.setattr(growth, "BATCHES", (1, 2))
    monkeypatch.setattr(growth, "BEAMS", (1, 2))
    monkeypatch.setattr(growth, "VOCABULARIES", (2000, 2500))
    monkeypatch.setattr(growth.machine, "in_own_process", lambda function, *arguments: 1)


def test_all_measures_everything_and_ends_with_the_ratios(monkeypatch, capsys, tmp_path, corpus_and_model):
    monkeypatch.setattr(contenders, "BATCH_SIZES", {"cpu": (8,)})
    monkeypatch.setattr(contenders, "TOKEN_BUDGETS", {"cpu": (64,)})
    monkeypatch.setattr(contenders, "UNSORTED_TOKEN_BUDGETS", {"cpu": (64,)})
    monkeypatch.setattr(losses, "SIZES", [(16, 300)])
    monkeypatch.setattr(
        loading, "benchmark", lambda *_, **__: [{**LOADED, "contender": n} for n in ("ours", "MarianMT")]
    )
    brief_growth(monkeypatch)
    out, picture = tmp_path / "all.json", tmp_path / "growth.png"
    flags = ["--vocab_size", "300", "--tokens_per_update", "64", "--rounds", "1", "--threads", "1"]
    flags += ["--no_memory", "true", "--output", str(out), "--plot", str(picture)]
    text = run(monkeypatch, capsys, "all", *corpus_and_model, *flags)
    order = [text.index(f"({name}: ") for name in ("train", "loss", "decode", "load", "growth", "summary")]
    assert order == sorted(order)
    results = json.loads(out.read_text())
    assert {"machine", "train", "loss", "decode", "latency", "decode_random", "load", "growth"} <= results.keys()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {row["workload"] for row in results["train"]} == {"tiny, V 300"}
    last = text[order[-2] :]
    for found in (
        "training, tiny, V 300, tokens/s | MarianMT random",
        "decoding, the trained model, fp32",
        "one sentence alone, fp32",
        "loss, d_model 16, V 300, bf16",
        "import and load, tiny",
    ):
        assert " ".join(found.split()) in " ".join(last.split())


LOADED = {"import_seconds": 1.0, "load_seconds": 0.1, "bytes": 10**6}


def test_decode_of_a_checkpoint_prints_a_row_for_each_contender(monkeypatch, capsys, tmp_path, corpus_and_model):
    out = tmp_path / "decode.json"
    flags = ["--rounds", "1", "--threads", "1", "--num_beams", "2", "--no_memory", "true", "--output", str(out)]
    text = run(monkeypatch, capsys, "decode", *corpus_and_model, *flags)
    results = json.loads(out.read_text())
    names = [row["contender"] for row in results["decode"]]
    assert names[:7] == [
        *(decoding.OURS, decoding.PAPER, decoding.HALF, decoding.INT8),
        *(decoding.MARIAN, decoding.MARIAN_HALF, decoding.MARIAN_THREADS),
    ]
    by_name = {row["contender"]: row for row in results["decode"]}
    assert by_name[decoding.MARIAN]["inter_threads"] == by_name[decoding.MARIAN_HALF]["inter_threads"] == 1
    assert names == [row["contender"] for row in results["latency"]]
    assert names == [row["contender"] for row in results["decode_random"]["tiny, V 8,000"]]
    assert "40 sentences, 2 beams" in text
    for name in names:
        assert sum(line.split(" |")[0].strip("| ") == name for line in text.splitlines()) == 3


def test_loss_and_growth_by_the_command_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(losses, "SIZES", [(16, 300)])
    brief_growth(monkeypatch)
    text = run(monkeypatch, capsys, "loss", "--rounds", "1", "--threads", "1", "--no_memory", "true")
    assert "| 16, 300 " in text
    assert text.count("x |") == 2  # a ratio in each precision
    picture = tmp_path / "growth.png"
    text = run(
        monkeypatch, capsys, "growth", "--size", "tiny", "--rounds", "1", "--threads", "1", "--plot", str(picture)
    )
    for axis in ("source tokens", "sentences, 4 beams", "beams, 16 sentences", "vocabulary"):
        assert f"| {axis} " in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_memory_of_decoding_is_that_of_the_process_of_its_own():
    model = workload.Workload("base", 300).ours().eval()
    task = decoding.Task([[5, 6, 7, 1]] * 4, 2, 3, workload.PAD, workload.EOS)
    rows = [{"contender": decoding.OURS, "batch": 2, "inter_threads": 2}]
    decoding.add_memory(rows, model, task, 1)
    taken = rows[0]["memory"]["peak"] - rows[0]["memory"]["before"]
    assert 4 * model.num_parameters() < taken < 16 * model.num_parameters()


def test_the_grammars_model_is_trained_once(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    commands = []

    def train(command, check):
        commands.append(command)
        folder = tmp_path / command[command.index("--output_dir") + 1]
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("subprocess.run", train)
    assert benchmark.grammar_model() == benchmark.grammar_model() == "runs/benchmark-grammar"
    assert len(commands) == 1
    assert commands[0][1:3] == [str(SCRIPTS / "train.py"), str(SCRIPTS / "recipes" / "phrase_grammar.yaml")]
    assert commands[0][commands[0].index("--d_model") + 1] == "256"


def test_a_gpu_gets_the_large_sizes_unless_others_are_asked_for():
    (arguments,) = benchmark.parse(["--device", "cuda"], "", [benchmark.BenchmarkArguments])
    benchmark.prepare_gpu(arguments)
    assert (arguments.size, arguments.vocab_size, arguments.precision) == (["base", "big"], [37_000], ["bf16"])
    assert arguments.tokens_per_update == 25_000
    words = ["--device", "cuda", "--size", "tiny", "--tokens_per_update", "512"]
    (arguments,) = benchmark.parse(words, "", [benchmark.BenchmarkArguments])
    benchmark.prepare_gpu(arguments)
    assert (arguments.size, arguments.tokens_per_update) == (["tiny"], 512)


def test_the_machine_is_told_in_a_line():
    found = machine.describe("cpu")
    line = machine.machine_line({**found, "device": "A", "threads": 2, "cores": 8, "gemm_fp32": 1.5e12})
    assert line.startswith(f"A, 2 threads on 8 cores, torch {torch.__version__}, transformers ")
    assert "matrix product 1,500 GFLOP/s fp32, " in line
    assert found["gemm_bf16"] > 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "the first word must be one of train"),
        ([], "the first word must be one of train"),
        (["train", "--size", "huge"], "--size huge is unknown"),
        (["train", "--precision", "fp8"], "--precision fp8 is unknown"),
        (["train", "--rounds", "0"], "--rounds 0 must be at least 1"),
        (["train", "--device", "cuda"], "--device cuda cannot be used"),
        (["train", "--data", "nowhere.en"], "there is no file nowhere.en"),
        (["learn"], "learn needs --data"),
        (["gpu"], "gpu needs --device cuda, got cpu"),
        (["loss", "--output", "no/such/folder.json"], "--output no/such/folder.json: there is no folder no/such"),
        (["decode", "--checkpoint", "no/such/model"], "no/such/model"),
        (["train", "--contenders", "fairseq"], "--contenders fairseq is unknown"),
        (["learn", "--data", __file__, "--test_data", __file__, "--contenders", "torch_nn"], "torch_nn is not one of"),
    ],
)
def test_bad_arguments_are_refused(monkeypatch, capsys, arguments, expected):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as refused:
        run(monkeypatch, capsys, *arguments)
    assert expected in f"{refused.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(("alone", "best"), [(2.0, (64, 1)), (6.0, (32, 2))])
def test_how_to_decode_is_found_by_growing_the_batch_while_that_is_faster(monkeypatch, alone, best):
    seconds = {(16, 2): 5.0, (32, 2): 4.0, (64, 2): 4.5, (16, 1): 8.0, (32, 1): 7.0, (64, 1): alone, (128, 1): 9.0}
    tried = []

    def decode(sources, settings):
        tried.append((settings.batch, settings.inter_threads))
        return []

    monkeypatch.setattr(machine, "timed_once", lambda run: (run(), seconds[tried[-1]])[1])
    found = decoding.best_settings(decode, [[1]] * 128, (16, 32, 64, 128), 2)
    assert found == decoding.SearchSettings(*best)
    assert tried == [(8, 2), *list(seconds)[:3], (16, 1), *list(seconds)[3:]]  # the first of each is not timed


def test_few_sentences_for_many_threads_are_divided_among_them():
    tried = []
    decoding.best_settings(lambda sources, settings: tried.append(settings) or [], [[1]] * 20, (16, 32), 8)
    assert tried[1] == decoding.SearchSettings(2, 8)
    assert tried[-1] == decoding.SearchSettings(16, 1)


def test_settings_are_found_by_growing_the_batch_while_that_is_faster():
    rates = {(16, False): 3.0, (16, True): 5.0, (32, True): 6.0, (64, True): 5.5, (128, True): 9.0}
    tried = []

    class Bench:
        def batch_sizes(self, name, tokens_per_update):
            return [16, 32, 64, 128]

        def make(self, name, settings):
            tried.append((settings.batch, settings.bf16))
            assert settings.tokens_per_update == 1024  # smaller than what is measured then
            meter = contenders.Meter("cpu")
            tokens = rates[settings.batch, settings.bf16]
            meter.ends = [(10.0, tokens), (11.0, 2 * tokens)]  # the first update of ten seconds does not count
            return lambda updates: meter

    assert training.best_settings(Bench(), "peer", 4096, (False, True)) == contenders.Settings(32, True, 4096)
    assert tried == [(16, False), (16, True), (32, True), (64, True)]
