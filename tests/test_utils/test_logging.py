"""Imports print what they have to say, without the notices that nobody can act on."""

import logging

from mmengine.logging import MMLogger

from mapet_mm.utils.logging import LINES, import_quietly, quieten


def test_notices_are_hidden_and_all_else_is_passed_on(tmp_path, monkeypatch, capsys):
    text = "print('Could not import OneDL'); print('this GPU is too old'); 1 / 0"
    (tmp_path / "talks_on_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        import_quietly("talks_on_import")
    except ZeroDivisionError:
        assert capsys.readouterr().out == "this GPU is too old\n"


def test_a_long_message_is_in_the_log_file_and_a_long_warning_is_begun_in_the_terminal(tmp_path, capsys):
    logger = quieten(MMLogger(f"quiet {tmp_path.name}", log_file=str(tmp_path / "log")))
    listing = [f"size mismatch {number}" for number in range(20)]
    logger.info("\n".join(["environment", *listing]))
    logger.warning("\n".join(["the weights do not fit", *listing]))
    logger.info("short")
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == LINES + 1
    assert "the weights do not fit" in shown[0]
    assert shown[1 : LINES - 1] == listing[: LINES - 2]
    assert shown[LINES - 1] == f"... ({21 - LINES + 1} more lines in the log file)"
    assert shown[LINES].endswith("short")
    assert (tmp_path / "log").read_text().count("size mismatch 19") == 2
    logging.getLogger(logger.name).handlers.clear()
