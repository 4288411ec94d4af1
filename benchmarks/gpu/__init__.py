"""Generated code for an absent GPU, its predicted cost, and the checks of ``make gpu-validate`` on a present one."""
