"""What a run does about losses that are not finite, devices that compute wrongly, and slow ranks."""
