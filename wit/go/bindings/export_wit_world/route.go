// Package export_wit_world is what the generated bindings call: the policy's function. What lies beside it in
// `bindings` is written by `forkpoint policy build`.
package export_wit_world

import (
	"github.com/forkpoint/forkpoint/wit/go/bindings/forkpoint_policy_dispatch"
	"github.com/forkpoint/forkpoint/wit/go/bindings/forkpoint_policy_engine"
	"github.com/forkpoint/forkpoint/wit/go/bindings/forkpoint_policy_types"
	"github.com/forkpoint/forkpoint/wit/go/types"
)

// Policy is set before the first request.
var Policy func(*forkpoint_policy_types.Request, *forkpoint_policy_engine.Session) (forkpoint_policy_dispatch.Routing, error)

// Route is the contract's `route`.
func Route(request forkpoint_policy_types.Request, session *forkpoint_policy_engine.Session) types.Result[forkpoint_policy_dispatch.Routing, string] {
	if Policy == nil {
		return types.Err[forkpoint_policy_dispatch.Routing]("no policy: call forkpoint.Policy in an init function")
	}
	routing, err := Policy(&request, session)
	if err != nil {
		return types.Err[forkpoint_policy_dispatch.Routing](err.Error())
	}
	return types.Ok[forkpoint_policy_dispatch.Routing, string](routing)
}
