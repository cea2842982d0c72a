module github.com/forkpoint/forkpoint/wit/go

go 1.24
