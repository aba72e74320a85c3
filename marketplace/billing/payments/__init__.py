"""The payment processor behind one port: a sandbox that moves no money, and Stripe."""
