"""What every task of a job runs: the processes of one rank."""
