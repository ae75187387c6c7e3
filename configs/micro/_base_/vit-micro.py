# ViT-micro: 4 layers of width 96, 3 heads of 32.
arch = dict(embed_dims=96, num_layers=4, num_heads=3, feedforward_channels=384)
