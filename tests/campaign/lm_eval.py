"""lm-eval on an exported folder, with tasks of two kinds. Its results equal those of
scripts.evaluate. Skipped if lm-eval is not installed.

    python -m pytest tests/campaign/lm_eval.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import NO_NETWORK, TEXT
from helpers.runs import models_to_export

from clearhead.models.pretrained import load_pretrained
from scripts import evaluate, export_hf

pytest.importorskip("lm_eval")
TASKS = {
    "my_text": """
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
""",
    "my_choice": """
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
""",
}
QUESTIONS = [
    {"question": "The quick fox jumps over the", "choices": ["dog", "zebra"], "answer": 0},
    {"question": "Line 5: the quick", "choices": ["xylophone", "fox", "Q"], "answer": 1},
    {"question": "jumps", "choices": ["over it", "of"], "answer": 1},
]


@pytest.mark.parametrize("source", ["bytes", "gpt2"])
def test_lm_eval_computes_what_we_do(in_process, tmp_path, source):
    """Some texts are longer than the window, some shorter."""
    models_to_export(tmp_path)
    code, _, err = in_process(export_hf.main, tmp_path, f"checkpoint={source}", "out=my-model")
    assert code == 0, err
    ours = load_pretrained(tmp_path / "my-model")
    model, encoding, window = ours.model, ours.tokenizer, ours.window
    texts = [TEXT[:1000], "x", "naïve “twice”\n\n", TEXT[1000 : 1000 + window]]
    write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    write_lines(tmp_path / "questions.jsonl", QUESTIONS)
    (tmp_path / "tasks").mkdir()
    for name, content in TASKS.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(f"task: {name}{content}", encoding="utf-8")

    arguments = ["--model", "hf", "--tasks", ",".join(TASKS), "--include_path", "tasks"]
    arguments += ["--model_args", f"pretrained=my-model,dtype=float32,max_length={window}"]
    arguments += ["--device", "cpu", "--output_path", "found"]
    home = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    options = {"env": os.environ | home | {"PYTHONPATH": str(NO_NETWORK)}, "timeout": 600}
    program = Path(sys.executable).with_name("lm_eval")
    done = subprocess.run(
        [program, *arguments], cwd=tmp_path, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "found").rglob("*.json")
    found = json.loads(path.read_text())["results"]

    settings = ("checkpoint=my-model", "data.path=texts.jsonl", "data.within_documents=true")
    code, _, err = in_process(evaluate.main, tmp_path, *settings, "out=ours.json")
    assert code == 0, err
    expected = json.loads((tmp_path / "ours.json").read_text())
    assert expected["rule"]["max_length"] == window
    assert expected["bytes"] == sum(len(text.encode()) for text in texts)
    bits = found["my_text"]["bits_per_byte,none"]
    assert bits == pytest.approx(expected["bits_per_byte"], abs=1e-5)

    right = [likeliest(model, encoding, question) == question["answer"] for question in QUESTIONS]
    assert found["my_choice"]["acc,none"] == pytest.approx(sum(right) / len(right))


def write_lines(path, records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def likeliest(model, encoding, question) -> int:
    """The number of the choice that the model gives the highest probability."""
    scores = []
    for choice in question["choices"]:
        ids = encoding.encode(f"{question['question']} {choice}")
        start = len(encoding.encode(question["question"]))
        with torch.no_grad():
            logits, _ = model(torch.tensor([ids[:-1]]))
        log_probs = torch.log_softmax(logits[0].float(), -1)
        targets = torch.tensor(ids[1:])[:, None]
        scores.append(float(log_probs.gather(1, targets)[start - 1 :].sum()))
    return max(range(len(scores)), key=scores.__getitem__)
