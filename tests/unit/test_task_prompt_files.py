"""Prompts from files: every row becomes a problem, or an error names file and line."""

import datetime
import json
import sys

import pytest

from laminar.schema.errors import UserError
from laminar.tasks.prompt_files import PromptFileTask

EXACT = "prompt_files_rewards:exact"


@pytest.fixture(autouse=True)
def recipe(tmp_path, monkeypatch):
    """A recipe's folder with a reward function; it is on the module search path."""
    (tmp_path / "prompt_files_rewards.py").write_text(
        "def exact(payload, answer): return float(answer == payload['answer'])\nnothing = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "prompt_files_rewards", raising=False)
    return tmp_path


def write(file, *rows):
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_jsonl_rows_become_problems_in_order(recipe):
    messages = [{"role": "user", "content": "3+4?"}]
    rows = [{"prompt": "1+1=", "answer": "2", "level": 1}, "\n", {"prompt": messages, "answer": "7"}]
    task = PromptFileTask(write(recipe / "a.jsonl", *rows), reward=EXACT)
    first, second = task.problems("train")
    assert (first.problem_id, first.prompt, first.payload) == ("a.jsonl:1", "1+1=", {"answer": "2", "level": 1})
    assert (second.problem_id, second.prompt) == ("a.jsonl:3", tuple(messages))
    assert task.grade(second, "7") == 1.0
    assert task.grade(second, "8") == 0.0
    assert list(task.problems("heldout")) == []


def test_ids_and_prompts_come_from_the_named_fields(recipe):
    path = write(recipe / "a.jsonl", {"question": "1+1=", "key": 17, "answer": "2"})
    (problem,) = PromptFileTask(path, EXACT, prompt_field="question", id_field="key").problems("train")
    assert (problem.problem_id, problem.prompt, problem.payload) == ("17", "1+1=", {"answer": "2"})


def test_relative_paths_are_looked_for_beside_the_recipe(recipe, tmp_path_factory, monkeypatch):
    write(recipe / "beside.jsonl", {"prompt": "x"})
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert len(PromptFileTask("beside.jsonl", EXACT).problems("train")) == 1


def test_a_share_is_held_out_by_id_and_adding_rows_moves_none(recipe):
    rows = [{"prompt": str(i), "id": f"p{i}"} for i in range(400)]

    def splits(rows):
        task = PromptFileTask(write(recipe / "a.jsonl", *rows), EXACT, id_field="id", heldout_fraction=0.25)
        return [{p.problem_id for p in task.problems(split)} for split in ("train", "heldout")]

    train, heldout = splits(rows)
    assert 70 < len(heldout) < 130
    assert not train & heldout
    assert len(train | heldout) == 400
    new = [{"prompt": "n", "id": "new"}]
    new_train, new_heldout = splits(new + rows)
    assert train <= new_train
    assert heldout <= new_heldout


def test_held_out_prompts_may_have_their_own_file(recipe):
    train = write(recipe / "train.jsonl", {"prompt": "a"})
    heldout = write(recipe / "test.jsonl", {"prompt": "b"}, {"prompt": "c"})
    task = PromptFileTask(train, EXACT, heldout=heldout)
    assert [p.problem_id for p in task.problems("heldout")] == ["test.jsonl:1", "test.jsonl:2"]
    with pytest.raises(UserError, match="not both"):
        PromptFileTask(train, EXACT, heldout=heldout, heldout_fraction=0.1)
    with pytest.raises(UserError, match="below 1"):
        PromptFileTask(train, EXACT, heldout_fraction=1.0)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{broken\n", r"a\.jsonl:2: not JSON \(.*\); each line must be one JSON object"),
        ("[1]\n", r"a\.jsonl:2: each line must be one JSON object, not a list"),
        ({"promt": "x", "answer": "y"}, r"a\.jsonl:2: the field 'prompt' is missing; this row has promt, answer"),
        ({"prompt": None}, r"a\.jsonl:2: the field 'prompt' is missing"),
        ({"prompt": 3}, r"a\.jsonl:2: the field 'prompt' must be a text or a list of messages like .*, but is '3'"),
        ({"prompt": [{"role": "user"}]}, r"a\.jsonl:2: the field 'prompt' must be a text or a list of messages"),
        ({"prompt": []}, r"a\.jsonl:2: the field 'prompt' must be a text or a list of messages"),
        ({"prompt": "x"}, r"a\.jsonl:2: the field 'id' is missing"),
        ({"prompt": "x", "id": "one"}, r"a\.jsonl:2: the id 'one' was already used in line 1; ids must be unique"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(recipe, row, sentence):
    path = write(recipe / "a.jsonl", {"prompt": "x", "id": "one"}, row)
    with pytest.raises(UserError, match=sentence):
        PromptFileTask(path, EXACT, id_field="id").problems("train")


def test_files_that_cannot_be_read_are_named(recipe):
    cases = {
        "missing.jsonl": "lies neither in the current directory",
        str(recipe / "missing.jsonl"): r"missing\.jsonl does not exist",
        write(recipe / "a.txt", "x"): r"a\.txt: prompts are read from \.jsonl, \.parquet files",
        write(recipe / "empty.jsonl", "\n"): r"empty\.jsonl holds no prompts",
    }
    for path, sentence in cases.items():
        with pytest.raises(UserError, match=sentence):
            PromptFileTask(path, EXACT).problems("train")


def test_a_wrong_reward_is_refused_at_once(recipe):
    path = write(recipe / "a.jsonl", {"prompt": "x"})
    with pytest.raises(UserError, match="has no 'exakt', did you mean 'exact'"):
        PromptFileTask(path, "prompt_files_rewards:exakt")
    with pytest.raises(UserError, match="is not a function"):
        PromptFileTask(path, "prompt_files_rewards:nothing")


def test_parquet_rows_become_problems_with_json_payloads(recipe):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "day": datetime.date(2025, 1, 2), "n": [1, 2]},
        {"prompt": [{"role": "user", "content": "ho"}], "day": None, "n": []},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), recipe / "a.parquet")
    first, second = PromptFileTask(str(recipe / "a.parquet"), EXACT).problems("train")
    assert (first.problem_id, first.payload) == ("a.parquet:1", {"day": "2025-01-02", "n": [1, 2]})
    assert (second.problem_id, second.prompt) == ("a.parquet:2", ({"role": "user", "content": "ho"},))


def test_a_saved_dataset_becomes_problems(recipe):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(recipe / "saved"))
    (problem,) = PromptFileTask(str(recipe / "saved" / "train"), EXACT).problems("train")
    assert (problem.problem_id, problem.payload) == ("train:1", {"answer": "2"})
    with pytest.raises(UserError, match=r"holds several datasets; name one of them: .*saved/train, .*saved/test"):
        PromptFileTask(str(recipe / "saved"), EXACT).problems("train")
    (recipe / "other").mkdir()
    with pytest.raises(UserError, match="is not a dataset saved with save_to_disk"):
        PromptFileTask(str(recipe / "other"), EXACT).problems("train")


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("a.parquet", "pyarrow.parquet", "parquet"), ("saved", "datasets", "datasets")]
)
def test_a_missing_reader_names_the_extra_to_install(recipe, monkeypatch, name, module, extra):
    (recipe / name).mkdir() if name == "saved" else (recipe / name).touch()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"needs {module}: pip install laminar-rl\[{extra}\]"):
        PromptFileTask(str(recipe / name), EXACT).problems("train")
