"""`mapet-mm finetune`: the labels, what they are split into, and the configs of the trainings."""
