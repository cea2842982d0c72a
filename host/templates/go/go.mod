// Go refuses some names that policies may have, such as "std".
module policy-{{name}}

go 1.24

require github.com/forkpoint/forkpoint/wit/go v0.0.0

replace github.com/forkpoint/forkpoint/wit/go => ./wit/go
