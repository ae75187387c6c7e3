# The cutting point, by the first protocols of frozen evaluation.
_base_ = "../micro/cutting_point.py"

protocols = 1
notes = [_base_.first_note, *_base_.notes[1:]]
