//! What happens when.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Events in the order of their times; those of one time in the order in which they were added.
#[derive(Debug)]
pub struct Events<E> {
    heap: BinaryHeap<Reverse<(u64, u64, Entry<E>)>>,
    added: u64,
}

/// Never compared: the number before it is unique.
#[derive(Debug)]
struct Entry<E>(E);

impl<E> PartialEq for Entry<E> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, _: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

impl<E> Default for Events<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), added: 0 }
    }
}

impl<E> Events<E> {
    /// `event` happens at `time`.
    pub fn add(&mut self, time: u64, event: E) {
        self.heap.push(Reverse((time, self.added, Entry(event))));
        self.added += 1;
    }

    /// The next event and its time.
    pub fn pop(&mut self) -> Option<(u64, E)> {
        self.heap.pop().map(|Reverse((time, _, Entry(event)))| (time, event))
    }

    /// When the next event happens; the end of time if there is none.
    pub fn next_time(&self) -> u64 {
        self.heap.peek().map_or(u64::MAX, |Reverse((time, ..))| *time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_of_time_and_then_of_addition() {
        let mut events = Events::default();
        for (time, name) in [(5, 'c'), (3, 'a'), (5, 'd'), (3, 'b')] {
            events.add(time, name);
        }
        assert_eq!(events.next_time(), 3);
        let order: Vec<_> = std::iter::from_fn(|| events.pop()).collect();
        assert_eq!(order, [(3, 'a'), (3, 'b'), (5, 'c'), (5, 'd')]);
        assert_eq!(events.next_time(), u64::MAX);
    }
}
