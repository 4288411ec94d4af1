"""The predicted cost of code for an absent GPU, and the checks of ``make gpu-validate`` on a present one."""
