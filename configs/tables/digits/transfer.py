# The paper's cross-domain transfer (tab:suppl_new_domains), from digits to two other domains of digits.
_base_ = "../digits.py"

title = "Linear probe on other domains, pre-trained on digits"
rows = [_base_.scratch, _base_.cae, _base_.beit, _base_.mapet]
columns = [
    dict(
        name="inverted digits",
        unit="top-1, %",
        config=_base_.probe,
        data="digits_inverted",
        metric="accuracy/top1",
    ),
    dict(
        name="rotated digits",
        unit="top-1, %",
        config=_base_.probe,
        data="digits_rotated",
        metric="accuracy/top1",
    ),
]
notes = [
    _base_.probe_note,
    "The paper's domains are Stanford Cars, Food-101 and FGVC-Aircraft: CAE 53.6, 81.4, 40.5; BEiT 64.5, "
    "86.9, 44.9; MaPeT 68.5, 86.9, 46.8 (paper).",
]
