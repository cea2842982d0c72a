// Package export_wit_world is what the generated bindings call: the policy's function. What lies beside it in
// `bindings` is written by `forkpoint policy build`.
package export_wit_world

import (
	dispatch "github.com/forkpoint/forkpoint/wit/go/bindings/forkpoint_policy_dispatch"
	engine "github.com/forkpoint/forkpoint/wit/go/bindings/forkpoint_policy_engine"
	contract "github.com/forkpoint/forkpoint/wit/go/bindings/forkpoint_policy_types"
	"github.com/forkpoint/forkpoint/wit/go/types"
)

// Policy is set before the first request.
var Policy func(*contract.Request, *engine.Session) (dispatch.Routing, error)

// Route is the contract's `route`.
func Route(request contract.Request, session *engine.Session) types.Result[dispatch.Routing, string] {
	if Policy == nil {
		return types.Err[dispatch.Routing]("no policy: call forkpoint.Policy in an init function")
	}
	routing, err := Policy(&request, session)
	if err != nil {
		return types.Err[dispatch.Routing](err.Error())
	}
	return types.Ok[dispatch.Routing, string](routing)
}
