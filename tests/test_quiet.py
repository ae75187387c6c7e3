"""Imports print what they have to say, without the notices that nobody can act on."""

from mapet_mm.quiet import import_quietly


def test_notices_are_hidden_and_all_else_is_passed_on(tmp_path, monkeypatch, capsys):
    text = "print('Could not import OneDL'); print('this GPU is too old'); 1 / 0"
    (tmp_path / "talks_on_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        import_quietly("talks_on_import")
    except ZeroDivisionError:
        assert capsys.readouterr().out == "this GPU is too old\n"
