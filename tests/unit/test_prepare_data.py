"""Text to datasets: what is written, what is reused, what is refused."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_hybrid.data import ByteTokenizer, check_data_paths, check_dataset
from megatron_hybrid.data import prepare as data_prepare
from megatron_hybrid.data.entropy import measure
from megatron_hybrid.data.prepare import split_of
from megatron_hybrid.data.sources import cap_sources, find_sources, stdlib_sources
from megatron_hybrid.mcore import validation
from megatron_hybrid.mcore.errors import UserError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_data.py"
sys.path.insert(0, str(SCRIPT.parent))

import prepare_data  # noqa: E402


def run(tmp_path, *flags: str) -> dict:
    """The script's work in this process; returns the record."""
    prefix = tmp_path / "out" / "text"
    result, _ = prepare_data.run(prepare_data.parse_args([*flags, "--output", str(prefix)]))
    return {"result": result, "prefix": str(prefix), "meta": json.loads(Path(f"{prefix}.meta.json").read_text())}


@pytest.fixture
def folder(tmp_path):
    """40 small documents, one of them not text, one hidden, one of another kind."""
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    for i in range(40):
        (root / "sub" / f"{i:02d}.txt").write_text(f"document {i}: " + "ünïcode words " * (i + 1))
    (root / "broken.txt").write_bytes(b"fine so far \xff\xfe")
    (root / "zero.txt").write_bytes(b"a\0b")
    (root / ".hidden.txt").write_text("not read")
    (root / "picture.png").write_bytes(b"\x89PNG")
    return root


def read_back(prefix: str) -> list[str]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    tokenizer = ByteTokenizer()
    documents = [np.asarray(dataset[i]) for i in range(len(dataset))]
    assert all(ids[-1] == tokenizer.eod and (ids[:-1] < 256).all() for ids in documents)
    return [tokenizer.decode(ids) for ids in documents]


def test_folder_is_read_back_by_megatron(tmp_path, folder):
    out = run(tmp_path, "--input", str(folder), "--split", "0.7,0.3")
    texts = {split: read_back(f"{out['prefix']}_{split}") for split in ("train", "valid")}
    expected = sorted(p.read_text() for p in folder.rglob("[0-9]*.txt"))
    assert sorted(texts["train"] + texts["valid"]) == expected
    for split, documents in texts.items():
        assert all(split_of(text, (0.7, 0.3)) == split for text in documents)
        assert out["meta"]["splits"][split]["documents"] == len(documents)
        assert out["meta"]["splits"][split]["tokens"] == sum(len(t.encode()) + 1 for t in documents)
    assert len(out["result"].skipped) == 2 and out["result"].num_files == 40


def test_second_run_reuses_and_a_change_does_not(tmp_path, folder):
    flags = ("--input", str(folder), "--split", "0.7,0.3")
    first = run(tmp_path, *flags)
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    again = run(tmp_path, *flags)
    assert again["result"].reused and not first["result"].reused
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == times
    assert again["result"].entropies == first["result"].entropies

    (folder / "new.txt").write_text("one more")
    assert not run(tmp_path, *flags)["result"].reused
    assert not run(tmp_path, *flags[:2], "--split", "0.6,0.4")["result"].reused
    Path(f"{first['prefix']}_train.bin").write_bytes(b"")
    assert not run(tmp_path, *flags[:2], "--split", "0.6,0.4")["result"].reused


def test_new_data_drops_megatrons_old_indices(tmp_path, folder):
    cache = tmp_path / "out" / "text_train" / "cache"
    cache.mkdir(parents=True)
    run(tmp_path, "--input", str(folder), "--split", "0.7,0.3")
    assert not cache.exists()


def test_same_input_same_bytes(tmp_path, folder):
    sums = []
    for name in ("a", "b"):
        out = run(tmp_path / name, "--input", str(folder), "--split", "0.7,0.3")
        sums.append({k: v["sha256"] for k, v in out["meta"]["splits"].items()})
    assert sums[0] == sums[1]


def test_batches_change_no_byte(tmp_path, folder, monkeypatch):
    sums = []
    for characters in (1, 100, 1 << 20):
        monkeypatch.setattr(data_prepare, "BATCH", characters)
        out = run(tmp_path / str(characters), "--input", str(folder), "--split", "0.7,0.3")
        sums.append({k: v["sha256"] for k, v in out["meta"]["splits"].items()})
    assert sums[0] == sums[1] == sums[2]


def test_a_hugging_face_tokenizer_gets_many_texts_at_once(tmp_path, folder, monkeypatch):
    calls = []

    class Words:
        """Each word's length; callable as transformers' tokenizers are."""

        eos_token_id = 0

        def __len__(self):
            return 1000

        def __call__(self, texts, add_special_tokens, verbose):
            assert not add_special_tokens
            calls.append(len(texts))
            return {"input_ids": [[len(word) for word in text.split()] for text in texts]}

    auto = SimpleNamespace(from_pretrained=lambda path, local_files_only: Words())
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=auto))
    words = tmp_path / "tokenizer"
    words.mkdir()
    out = run(tmp_path, "--input", str(folder), "--split", "0.7,0.3", "--tokenizer-path", str(words))
    assert calls == [40]
    expected = sum(len(p.read_text().split()) + 1 for p in folder.rglob("[0-9]*.txt"))
    assert sum(split["tokens"] for split in out["meta"]["splits"].values()) == expected


def test_a_failure_leaves_nothing(tmp_path, folder):
    with pytest.raises(ValueError, match="needed"):
        run(tmp_path, "--input", str(folder), "--split", "0.999,0.001")
    assert list((tmp_path / "out").iterdir()) == []


def test_jsonl(tmp_path):
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps({"body": f"page {i}\nline", "id": i}) + "\n" for i in range(30)) + "\n")
    out = run(tmp_path, "--input", str(path), "--json-key", "body", "--split", "0.6,0.4")
    texts = read_back(out["prefix"] + "_train") + read_back(out["prefix"] + "_valid")
    assert sorted(texts) == sorted(f"page {i}\nline" for i in range(30))


def test_one_long_file_becomes_several_documents(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i} of a long book\n" for i in range(4000)))
    out = run(tmp_path, "--input", str(path), "--max-document-kib", "2", "--split", "0.8,0.2")
    texts = read_back(out["prefix"] + "_train") + read_back(out["prefix"] + "_valid")
    assert all(text.endswith("book\n") and len(text) < 2048 + 100 for text in texts)
    assert sum(map(len, texts)) == path.stat().st_size
    with pytest.raises(ValueError, match="the train split gets 1 of 1|the valid split gets 0 of 1|gets 0 of 1"):
        run(tmp_path, "--input", str(path), "--max-document-kib", "0")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda d: None, "no such file or folder"),
        (lambda d: d.mkdir(), "the folder has no file ending in"),
        (lambda d: d.write_text(""), "no documents: every file is empty"),
        (lambda d: d.write_text(" \n\n"), "no documents: every file is empty"),
        (lambda d: d.write_bytes(b"\0\1\2"), "holds zero bytes; UTF-8 text is expected"),
        (lambda d: d.write_bytes(b"caf\xe9"), "is not UTF-8"),
        (lambda d: d.write_text("short"), "split gets"),
    ],
    ids=["missing", "empty-folder", "empty-file", "blank", "binary", "latin-1", "one-document"],
)
def test_bad_input_is_one_line(tmp_path, make, message, capsys):
    make(tmp_path / "input")
    code = prepare_data.main(["--input", str(tmp_path / "input"), "--output", str(tmp_path / "o" / "p")])
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 1
    assert error.startswith("prepare_data.py: error: ") and message in error


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "fine"', ":2: not a line of JSON"),
        ('{"texts": "x"}', ":2: no key 'text'; there are 'texts'"),
        ('{"text": 3}', ":2: key 'text' holds int"),
        ("[1]", ":2: a JSON object is expected, found list"),
        ('{"text": "\\ud800 alone"}', "x.jsonl:2: key 'text' holds half of a surrogate pair"),
        ('{"text": ' + "[" * 100000 + "]" * 100000 + "}", "x.jsonl:2: not a line of JSON that is read: nested too deep"),
    ],
)
def test_bad_json_line_is_named(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError) as caught:
        run(tmp_path, "--input", str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--split", "0.9,0.2"], "add up to 1.1"),
        (["--split", "a,b"], "numbers separated by commas"),
        (["--split", "0,1"], "train > 0"),
        (["--split", "nan,1"], "numbers separated by commas"),
        (["--tokenizer-path", "no-such-folder"], "no such folder"),
        (["--max-mib", "0.000001"], "no input file is as small as the limit"),
    ],
)
def test_bad_options(tmp_path, folder, flags, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, "--input", str(folder), *flags)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--max-document-kib", "-1"], "--max-document-kib must not be negative"),
        (["--max-document-kib", "9" * 20], "at most 1073741824"),
        (["--max-mib", "nan"], "--max-mib must be a number above zero, found nan"),
        (["--max-mib", "-1"], "--max-mib must be a number above zero"),
        (["--tokenizer-path", ""], "--tokenizer-path: an empty name"),
        (["--input", ""], "--input: an empty name"),
    ],
)
def test_numbers_and_names_that_cannot_be_are_refused_by_flag(tmp_path, folder, flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "--input", str(folder), *flags)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_help_and_the_command_line(tmp_path, folder):
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--tokenizer-path" in done.stdout
    command = [sys.executable, str(SCRIPT), "--input", str(folder), "--split", "0.7,0.3", "--output", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bigram entropy" in done.stdout and "--tokenizer-type NullTokenizer --vocab-size 258" in done.stdout
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr


def test_end_of_document_is_the_one_megatron_assumes():
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    tokenizer = ByteTokenizer()
    flags = tokenizer.training_flags()
    assert flags == ["--tokenizer-type", "NullTokenizer", "--vocab-size", "258"]
    assert NullTokenizer(vocab_size=258).eod == tokenizer.eod
    text = "naïve\t\u20ac"
    assert [tokenizer.decode(ids) for ids in tokenizer.encode([text, ""])] == [text, ""]


def test_entropy_by_hand():
    # a b a b ...: half a, half b; the next token is certain
    assert measure(np.array([0, 1] * 500), 2).unigram == pytest.approx(math.log(2))
    assert measure(np.array([0, 1] * 500), 2).bigram == pytest.approx(0, abs=1e-12)
    independent = np.random.default_rng(0).integers(0, 4, 200_000)
    found = measure(independent, 4)
    assert found.unigram == pytest.approx(math.log(4), abs=1e-3)
    assert found.bigram == pytest.approx(math.log(4), abs=1e-3)


def test_entropy_of_a_large_vocabulary_is_the_same_sum(monkeypatch):
    from megatron_hybrid.data import entropy

    tokens = np.random.default_rng(1).integers(0, 50, 10_000)
    dense = measure(tokens, 50)
    monkeypatch.setattr(entropy, "_MAX_DENSE_PAIRS", 0)
    monkeypatch.setattr(entropy, "_CHUNK", 999)
    sparse = measure(tokens, 50)
    assert (sparse.unigram, sparse.bigram) == pytest.approx((dense.unigram, dense.bigram))


def test_stdlib_and_the_cap_are_stable():
    sources = stdlib_sources()
    labels = [source.label for source in sources]
    assert "argparse.py" in labels and not any("site-packages" in label for label in labels)
    assert not any(label.startswith(("test/", "idlelib/idle_test/")) for label in labels)
    capped = cap_sources(sources, 1 << 20)
    assert capped == cap_sources(list(sources), 1 << 20)
    assert 0.9 * (1 << 20) < sum(s.path.stat().st_size for s in capped) <= 1 << 20
    assert set(capped) <= set(sources)


def test_suffixes(folder):
    assert [s.path.name for s in find_sources([str(folder)], (".png",))] == ["picture.png"]


@pytest.fixture
def dataset(tmp_path, folder):
    return run(tmp_path, "--input", str(folder), "--split", "0.7,0.3")["prefix"] + "_train"


def test_check_passes_a_whole_dataset(dataset):
    info = check_dataset(dataset, sequence_length=64, split=(90, 10))
    assert info.documents > 2 and info.dtype == "uint16"
    assert check_data_paths(["0.3", dataset, "0.7", dataset]) == check_data_paths([dataset, dataset])


def _truncate(path: str, keep: int) -> None:
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:keep])


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda p: Path(p + ".bin").unlink(), r"no file .*_train\.bin"),
        (lambda p: Path(p + ".idx").unlink(), r"no file .*_train\.idx"),
        (lambda p: _truncate(p + ".bin", 0), r"_train\.bin is empty"),
        (lambda p: _truncate(p + ".idx", 0), r"_train\.idx is empty"),
        (lambda p: _truncate(p + ".bin", -10), r"_train\.bin is truncated"),
        (lambda p: _truncate(p + ".idx", -8), r"_train\.idx is truncated"),
        (lambda p: _truncate(p + ".idx", 20), r"ends in its header"),
        (lambda p: Path(p + ".idx").write_bytes(b"text, not an index at all, no header"), "is not the index"),
        (lambda p: Path(p + ".bin").open("ab").write(b"xx"), "longer than its index"),
    ],
)
def test_check_names_the_fault(dataset, harm, message):
    harm(dataset)
    with pytest.raises(ValueError, match=message) as caught:
        check_dataset(dataset)
    assert "\n" not in str(caught.value)


def test_check_refuses_what_megatron_would_hang_on(dataset):
    with pytest.raises(ValueError, match="leave none for the test share of --split 999,0,1"):
        check_dataset(dataset, split=(999, 0, 1))
    with pytest.raises(ValueError, match="fewer than one sequence needs"):
        check_dataset(dataset, sequence_length=10**9)


def test_check_refuses_tokens_beyond_the_vocabulary(dataset):
    assert check_dataset(dataset, vocab_size=258) == check_dataset(dataset)  # the end of a document is 257
    with pytest.raises(ValueError, match="token 257 is beyond --vocab-size 257; give the tokenizer's flags"):
        check_dataset(dataset, vocab_size=257)
    with pytest.raises(ValueError, match="token 257 is beyond --vocab-size 100"):
        check_data_paths(["1", dataset], vocab_size=100)


def test_only_a_tokenizer_without_a_vocabulary_takes_it_from_the_flag(dataset):
    """Megatron ignores --vocab-size beside one that has its own."""
    run = SimpleNamespace(
        data_path=None, train_data_path=[dataset], valid_data_path=None, test_data_path=None, seq_length=8, vocab_size=100
    )
    run.tokenizer_type = "HuggingFaceTokenizer"
    validation.check_data(run)
    run.tokenizer_type = "NullTokenizer"
    with pytest.raises(UserError, match="token 257 is beyond --vocab-size 100"):
        validation.check_data(run)


def test_check_helps_with_the_prefix(dataset):
    with pytest.raises(ValueError, match="give the prefix without the suffix"):
        check_dataset(dataset + ".bin")
    with pytest.raises(ValueError, match="text_train, .*text_valid beside it"):
        check_dataset(dataset.removesuffix("_train"))


def test_importing_the_data_package_imports_no_megatron():
    code = "import sys, megatron_hybrid.data.prepare, megatron_hybrid.data.sources; print('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
