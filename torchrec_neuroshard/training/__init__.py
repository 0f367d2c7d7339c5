"""Making cost models of measurements: training, calibrating, judging, cards."""
