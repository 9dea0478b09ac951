// Whether weights are asked for before they are read: on some processors that saves a third of a step, on others, whose
// hardware asks early enough, it costs as much. So a program tries now and then what it does not do, and does what takes
// less time. What it computes is the same either way.
#pragma once

#include <algorithm>
#include <array>

namespace specserve {

class PrefetchChoice {
 public:
  // Of the next pass, over so many rows. Whoever calls it calls `took` when that pass is over, or not at all.
  bool next(int rows) {
    rows_ = rows <= kMaxRows ? rows : 0;
    is_trial_ = rows_ && usual_[rows_] > 0 && --until_trial_ <= 0;
    return is_on_ != is_trial_;
  }

  void took(double seconds) {
    if (!rows_) return;
    if (is_trial_)
      tried(seconds / usual_[rows_]);
    else
      usual_[rows_] = seconds;
    rows_ = 0;
  }

  bool is_on() const { return is_on_; }

 private:
  static constexpr int kMaxRows = 16;  // with more, arithmetic takes the time
  static constexpr int kTrials = 5;    // whose median decides
  static constexpr int kShortest = 2, kLongest = 256;  // passes from one trial to the next
  static constexpr double kWorthIt = 0.97;  // of the usual time: less is noise

  void tried(double ratio) {
    ratios_[num_trials_++ % kTrials] = ratio;
    if (num_trials_ >= kTrials) {
      auto sorted = ratios_;
      std::sort(sorted.begin(), sorted.end());
      gap_ = std::min(2 * gap_, kLongest);
      if (sorted[kTrials / 2] < kWorthIt) {
        is_on_ = !is_on_;
        num_trials_ = 0;
        gap_ = kShortest;
        usual_ = {};
      }
    }
    until_trial_ = gap_;
  }

  bool is_on_ = true, is_trial_ = false;
  int rows_ = 0;                               // of the pass that runs; 0: nobody wants to know how long it takes
  int gap_ = kShortest, until_trial_ = kShortest;  // passes between trials, longer the more of them change nothing
  int num_trials_ = 0;                         // since the last change
  std::array<double, kTrials> ratios_{};       // of trials to the usual time, the newest
  std::array<double, kMaxRows + 1> usual_{};   // seconds that the newest pass over so many rows took without a trial
};

}  // namespace specserve
