"""The program of each task of a job: it starts and watches one rank."""
