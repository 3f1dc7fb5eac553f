"""k-means of the keys in the queries' metric, without leaving the GPU."""
