module shell-gate

go 1.24
