// Refuses requests that would destroy data.
package main

import (
	"fmt"

	fp "github.com/forkpoint/forkpoint/wit/go"
)

func init() { fp.Policy(route) }

func main() {}

func route(request *fp.Request, session *fp.Session) (fp.Routing, error) {
	if fp.LastUser(request) == "" {
		return fp.Reject(400, "nothing-asked", "The last turn of the user is empty."), nil
	}
	answers, err := fp.Decide(session, fp.Boolean("Would the last request destroy data?"))
	if err != nil {
		return fp.Routing{}, err
	}
	routing := fp.Generate("harmless")
	if answers[0].Yes > 0.5 {
		routing = fp.Reject(403, "destroys-data", "This would destroy data; ask a person.")
	}
	return routing.Label("destroys", fmt.Sprintf("%.2f", answers[0].Yes)), nil
}
