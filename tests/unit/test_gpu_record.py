"""A machine without a GPU warns when the CUDA sources are not those that the recorded GPU test run had."""

import json

from conftest import KERNELS, kernel_hash, record_warning


def test_warns_when_kernels_are_newer_than_the_record(tmp_path):
    for folder in KERNELS:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.h").write_text("int a;\n")
    record = tmp_path / "gpu_tests.json"
    assert "no run" in record_warning(record, tmp_path)
    run = {"kernels": kernel_hash(tmp_path), "date": "2026-01-02", "card": "a card", "failed": 0, "error": 0}
    record.write_text(json.dumps(run))
    assert record_warning(record, tmp_path) is None
    record.write_text(json.dumps({**run, "failed": 1}))
    assert "failed" in record_warning(record, tmp_path)
    record.write_text(json.dumps(run))
    (tmp_path / KERNELS[0] / "a.h").write_text("int b;\n")
    assert "changed since" in record_warning(record, tmp_path)
    (tmp_path / KERNELS[0] / "a.h").rename(tmp_path / KERNELS[0] / "b.h")
    assert "csrc/cuda" in record_warning(record, tmp_path) and "2026-01-02" in record_warning(record, tmp_path)
