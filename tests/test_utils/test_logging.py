"""Imports print what they have to say, without the notices that nobody can act on."""

import logging

from mmengine.logging import MMLogger

from mapet_mm.utils.logging import import_quietly, quieten


def test_notices_are_hidden_and_all_else_is_passed_on(tmp_path, monkeypatch, capsys):
    text = "print('Could not import OneDL'); print('this GPU is too old'); 1 / 0"
    (tmp_path / "talks_on_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        import_quietly("talks_on_import")
    except ZeroDivisionError:
        assert capsys.readouterr().out == "this GPU is too old\n"


def test_a_long_message_is_in_the_log_file_and_a_warning_in_the_terminal_too(tmp_path, capsys):
    logger = quieten(MMLogger(f"quiet {tmp_path.name}", log_file=str(tmp_path / "log")))
    listing = "\n".join(f"size mismatch {number}" for number in range(20))
    logger.info(f"environment\n{listing}")
    logger.warning(f"the weights do not fit\n{listing}")
    logger.info("short")
    shown = capsys.readouterr().out
    assert "environment" not in shown
    assert shown.count("size mismatch") == 20
    assert shown.endswith("short\n")
    assert (tmp_path / "log").read_text().count("size mismatch 19") == 2
    logging.getLogger(logger.name).handlers.clear()
