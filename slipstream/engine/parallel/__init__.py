"""A text model spread over several devices (tensor parallelism): rank 0 serves, its followers do as it does.

Every rank is a process with one device and a share of every layer's heads and MLP. `shards` loads the shares, `ranks`
brings the processes together and watches them, `mirror` is what rank 0 computes with instead of the plain engine, and
`follower` repeats it. All that is seen of a caption (frames, sampling, text) stays at rank 0.
"""
