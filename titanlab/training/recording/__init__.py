"""What a run leaves behind while it trains: metrics, status, the tracker's rows, the console."""
