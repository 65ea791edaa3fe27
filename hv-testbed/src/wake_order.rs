//! Are sleepers woken in the order of their tickets?

use alloc::boxed::Box;

/// A sleep on a vCPU's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sleep {
    /// Its lock.
    pub lock: u64,
    /// Its ticket; wraps.
    pub ticket: u32,
}

/// What was seen of wakes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Wakes of sleepers that wait for a lock.
    pub wakes: u64,
    /// Those that came before the wake of the sleeper with the ticket before.
    pub before_previous: u64,
    /// Those that left a sleeper with any earlier ticket of the same lock asleep.
    pub before_earlier: u64,
}

/// Who of one VM sleeps.
#[derive(Debug)]
pub struct WakeOrder {
    asleep: Box<[Option<Sleep>]>,
    counts: Counts,
}

impl WakeOrder {
    /// Nobody sleeps.
    pub fn new(vcpus: usize) -> Self {
        Self { asleep: (0..vcpus).map(|_| None).collect(), counts: Counts::default() }
    }

    /// `vcpu` goes to sleep.
    pub fn sleeps(&mut self, vcpu: usize, sleep: Sleep) {
        self.asleep[vcpu] = Some(sleep);
    }

    /// `vcpu` does not sleep any more, and nobody woke it.
    pub fn is_up(&mut self, vcpu: usize) {
        self.asleep[vcpu] = None;
    }

    /// `vcpu` is woken.
    pub fn wakes(&mut self, vcpu: usize) {
        let Some(woken) = self.asleep[vcpu].take() else { return };
        self.counts.wakes += 1;
        let same = self.asleep.iter().flatten().filter(|other| other.lock == woken.lock);
        let distances = same.map(|other| woken.ticket.wrapping_sub(other.ticket) as i32);
        let (mut before_previous, mut before_earlier) = (false, false);
        for distance in distances {
            before_previous |= distance == 1;
            before_earlier |= distance > 0;
        }
        self.counts.before_previous += u64::from(before_previous);
        self.counts.before_earlier += u64::from(before_earlier);
    }

    /// What was seen so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn woken(tickets: &[u32], order: &[usize]) -> (u64, u64) {
        let mut seen = WakeOrder::new(tickets.len());
        for (vcpu, &ticket) in tickets.iter().enumerate() {
            seen.sleeps(vcpu, Sleep { lock: 1, ticket });
        }
        order.iter().for_each(|&vcpu| seen.wakes(vcpu));
        assert_eq!(seen.counts().wakes, order.len() as u64);
        (seen.counts().before_previous, seen.counts().before_earlier)
    }

    #[test]
    fn ticket_order_is_in_order_even_where_tickets_wrap() {
        assert_eq!(woken(&[7, 8, 9], &[0, 1, 2]), (0, 0));
        assert_eq!(woken(&[u32::MAX, 0, 1], &[0, 1, 2]), (0, 0));
    }

    #[test]
    fn any_other_order_is_seen() {
        assert_eq!(woken(&[7, 8, 9], &[1, 0, 2]), (1, 1));
        assert_eq!(woken(&[7, 9], &[1, 0]), (0, 1), "not the one before, but an earlier one");
    }

    #[test]
    fn locks_do_not_mix_and_who_is_up_does_not_count() {
        let mut seen = WakeOrder::new(3);
        seen.sleeps(0, Sleep { lock: 1, ticket: 1 });
        seen.sleeps(1, Sleep { lock: 2, ticket: 2 });
        seen.sleeps(2, Sleep { lock: 2, ticket: 1 });
        seen.is_up(2);
        seen.wakes(2);
        seen.wakes(1);
        assert_eq!(seen.counts(), Counts { wakes: 1, ..Counts::default() });
    }
}
