//! The sessions behind a guest's handles.

use wasmtime::component::Resource;

use super::guest::Place;

/// What lies behind the handles of one call. No number is given out twice in an instance's life, so that a handle
/// that a guest keeps from one call to the next leads nowhere.
#[derive(Default)]
pub(super) struct Sessions {
    /// The number of the first of this call.
    first: u32,
    places: Vec<Option<Place>>,
}

/// A guest used a handle that it gave away, or that it had in another call.
#[derive(Debug, thiserror::Error)]
#[error("there is no session {0}: it was given away, or is of an earlier call")]
pub(super) struct NoSession(u32);

impl Sessions {
    /// Those of the next call.
    pub(super) fn after(&self) -> Self {
        Self { first: self.next(), places: Vec::new() }
    }

    pub(super) fn push(&mut self, place: Place) -> Resource<Place> {
        let number = self.next();
        self.places.push(Some(place));
        Resource::new_own(number)
    }

    /// Whether a handle is of an earlier call.
    pub(super) fn is_past(&self, handle: &Resource<Place>) -> bool {
        handle.rep() < self.first
    }

    pub(super) fn get(&self, handle: &Resource<Place>) -> Result<&Place, NoSession> {
        let index = self.index(handle);
        index.and_then(|index| self.places.get(index)?.as_ref()).ok_or(NoSession(handle.rep()))
    }

    pub(super) fn get_mut(&mut self, handle: &Resource<Place>) -> Result<&mut Place, NoSession> {
        let index = self.index(handle);
        index.and_then(|index| self.places.get_mut(index)?.as_mut()).ok_or(NoSession(handle.rep()))
    }

    pub(super) fn take(&mut self, handle: &Resource<Place>) -> Result<Place, NoSession> {
        let index = self.index(handle);
        index.and_then(|index| self.places.get_mut(index)?.take()).ok_or(NoSession(handle.rep()))
    }

    /// The number of the next: a call's limit of forks keeps it far from its type's end.
    fn next(&self) -> u32 {
        self.first.saturating_add(u32::try_from(self.places.len()).unwrap_or(u32::MAX))
    }

    fn index(&self, handle: &Resource<Place>) -> Option<usize> {
        handle.rep().checked_sub(self.first).map(|index| index as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::offline::{Even, OfflineSession};
    use super::*;

    fn place() -> Place {
        Place::Offline(OfflineSession::holding(&[], Arc::new(Even)))
    }

    #[test]
    fn a_handle_leads_to_its_session_until_it_is_given_away() {
        let mut sessions = Sessions::default();
        let (one, two) = (sessions.push(place()), sessions.push(place()));
        assert!(sessions.get(&one).is_ok() && sessions.get_mut(&two).is_ok());
        assert!(sessions.take(&one).is_ok());
        assert!(sessions.get(&one).is_err() && sessions.take(&one).is_err());
        assert!(sessions.get(&two).is_ok() && sessions.get(&Resource::new_own(7)).is_err());
    }

    #[test]
    fn a_handle_of_an_earlier_call_leads_nowhere() {
        let mut sessions = Sessions::default();
        let old = sessions.push(place());
        let mut next = sessions.after();
        let new = next.push(place());
        assert_ne!(old.rep(), new.rep());
        assert!(next.get(&old).is_err() && next.get(&new).is_ok());
        assert!(next.is_past(&old) && !next.is_past(&new));
        assert!(next.after().get(&new).is_err());
    }
}
